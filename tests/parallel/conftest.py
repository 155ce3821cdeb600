"""Ranks are forked from a server, which imports here what nearly all of them need, once."""

import torch

from stepgauge.runtime.fork_server import preload

preload(
    "pytest",
    "stepgauge.models.transformer",
    "stepgauge.parallel.layout",
    "stepgauge.parallel.wrappers",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
)
if not torch.cuda.is_available():
    # torch.compile's backends, aot_eager too. In torch 2.11 this import looks for GPUs; a process that
    # has done so has no GPU in its forks.
    preload("torch._inductor.compile_fx")
