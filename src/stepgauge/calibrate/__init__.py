"""Measures a machine and writes the hardware file from which cost predicts.

`grids` has the shapes, `operations`, `calls` and `passes` what is timed, and `timing` the clock. `host`
and `wrappers` time the host, `contention` overlapping work, and `blocks` whole blocks. `run` makes one
record per operation. `machine` lists all jobs and writes the file; `step_shapes` lists those for certain
steps only.
"""
