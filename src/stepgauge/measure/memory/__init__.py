"""Tracks every storage of a step from its allocation to its release, on real and on fake tensors."""
