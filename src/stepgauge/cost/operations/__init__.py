"""The operations of a step as terms, part by part of the network (`step_operations` puts them together)."""
