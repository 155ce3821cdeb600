"""The study's experiments in their order, each a file of its name in study/, which loads torch."""

EXPERIMENTS = (
    "step-time",
    "warm-up",
    "profile",
    "precision",
    "compile",
    "norm-layers",
    "attention",
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
)
MACHINE_FILE = "machine.json"  # beside the records of a study: what experiments decided by
