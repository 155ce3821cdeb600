"""Plans as data: `parallel` executes them and `cost` simulates the same objects."""
