"""The study: a list of experiments, run where the machine can, and one report of all of them.

A new experiment is one file with an EXPERIMENT, and one line here.
"""

from stepgauge.study import (
    broadcast,
    collectives,
    compilation,
    memory,
    precision,
    profile,
    step_time,
    training,
    warm_up,
)

EXPERIMENTS = (
    step_time.EXPERIMENT,
    warm_up.EXPERIMENT,
    profile.EXPERIMENT,
    precision.EXPERIMENT,
    compilation.EXPERIMENT,
    memory.EXPERIMENT,
    collectives.EXPERIMENT,
    broadcast.EXPERIMENT,
    training.EXPERIMENT,
)
