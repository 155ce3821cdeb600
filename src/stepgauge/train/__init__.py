"""The training step, and the loop that trains with it on real text."""
