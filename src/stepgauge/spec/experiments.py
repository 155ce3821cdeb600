"""The names of the study's experiments in order. Each is a file in study/ with the same name.

Whole steps come first; attention has the most rows, 280 on a GPU, and comes last.

The names are listed here because those files import torch.
"""

EXPERIMENTS = (
    "step-time",
    "warm-up",
    "profile",
    "precision",
    "compile",
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
    "norm-layers",
    "attention",
)
# In the folder of a study: the properties of the machine that the experiments depend on.
MACHINE_FILE = "machine.json"
