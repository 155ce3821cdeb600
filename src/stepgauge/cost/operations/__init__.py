"""The operations of a training step as terms; `step_operations` puts them in order."""
