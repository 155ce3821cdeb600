"""Processes, ranks, groups, failures: one way to run on 1 to N ranks. And C++ built where it runs."""
