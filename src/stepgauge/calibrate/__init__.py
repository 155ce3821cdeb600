"""Microbenchmarks that turn a machine into a hardware file: what cost predicts from.

operations  what is timed, and over which shapes
run         one record an operation, and the file
"""
