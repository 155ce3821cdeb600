"""Gradients and weights as works on the data axis's communicator, a wrapper each."""
