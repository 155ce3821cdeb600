"""Specs, plans, records and the run store. Standard library only: no torch, no other package."""
