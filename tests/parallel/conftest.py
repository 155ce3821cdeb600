"""Ranks are forked from a server, which imports here what nearly all of them need, once."""

from stepgauge.runtime.fork_server import preload

preload(
    "pytest",
    "stepgauge.models.transformer",
    "stepgauge.parallel.layout",
    "stepgauge.parallel.wrappers",
    "torch._inductor.compile_fx",  # torch.compile's backends, aot_eager too
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
)
