"""Plans as data: parallel executes them, cost simulates the same object."""
