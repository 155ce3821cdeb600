"""A network that is known by its traced operators alone: its terms, memory, steps and plans."""
