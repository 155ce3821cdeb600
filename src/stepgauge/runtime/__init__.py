"""Processes, ranks, groups and failures: runs a function on 1 to N ranks. Also builds C++ code."""
