"""Finds the fastest configuration of a model on this machine, by measurement.

`choices` has the candidates for each option, `search` decides which of them are measured, and `output`
presents the result.
"""
