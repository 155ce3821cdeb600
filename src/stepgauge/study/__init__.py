"""The study: a list of experiments, run where the machine can, and one report of all of them.

A new experiment is one file with an EXPERIMENT, and one line here.
"""

from stepgauge.study import (
    attention,
    broadcast,
    collectives,
    compilation,
    data_parallel,
    fused_step,
    memory,
    norm_layers,
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
    norm_layers.EXPERIMENT,
    attention.EXPERIMENT,
    fused_step.EXPERIMENT,
    memory.EXPERIMENT,
    collectives.EXPERIMENT,
    data_parallel.EXPERIMENT,
    broadcast.EXPERIMENT,
    training.EXPERIMENT,
)
