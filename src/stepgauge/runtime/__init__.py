"""Processes, ranks, groups, failures, and the C++ that is built where it runs: one way to run on 1
to N ranks.
"""
