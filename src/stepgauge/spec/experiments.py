"""The names of the study's experiments, for the command line's help: study/ itself loads torch."""

EXPERIMENTS = (
    "step-time",
    "warm-up",
    "profile",
    "precision",
    "compile",
    "norm-layers",
    "attention",
    "output-loss",
    "optimizer",
    "fused-step",
    "memory",
    "collectives",
    "data-parallel",
    "sharded-state",
    "ddp-vs-fsdp",
    "pipeline",
    "layout",
    "broadcast",
    "validation",
    "training",
)
