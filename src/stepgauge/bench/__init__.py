"""Turns specs into measured records: builds what a spec names, measures it, and runs sweeps."""
