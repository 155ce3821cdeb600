"""A spec and what a machine can do in, modelled figures out. Needs no torch."""
