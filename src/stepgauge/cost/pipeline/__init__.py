"""A pipeline's step: its stages as durations, and the simulator that runs any checked schedule."""
