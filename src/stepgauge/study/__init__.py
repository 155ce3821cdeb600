"""The study: a list of experiments, run where the machine can, and one report of all of them.

A new experiment is one file with an EXPERIMENT, one line here, and its name in
spec/experiments.py.
"""

from stepgauge.study import (
    attention,
    broadcast,
    collectives,
    compilation,
    data_parallel,
    ddp_vs_fsdp,
    fused_step,
    layout,
    memory,
    norm_layers,
    optimizer,
    output_loss,
    pipeline,
    precision,
    profile,
    sharded_state,
    step_time,
    training,
    validation,
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
    output_loss.EXPERIMENT,
    optimizer.EXPERIMENT,
    fused_step.EXPERIMENT,
    memory.EXPERIMENT,
    collectives.EXPERIMENT,
    data_parallel.EXPERIMENT,
    sharded_state.EXPERIMENT,
    ddp_vs_fsdp.EXPERIMENT,
    pipeline.EXPERIMENT,
    layout.EXPERIMENT,
    broadcast.EXPERIMENT,
    validation.EXPERIMENT,
    training.EXPERIMENT,
)
