"""Custom operators: torch.compile does not trace into them, and selective checkpointing can save
their results.

They use the plain functions of torch.library, because its custom_op costs more host time than a
small operator takes to launch.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("stepgauge", "FRAGMENT")


def define_operator(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Defines torch.ops.stepgauge.<name>, which calls `run` on every device and has no gradient.

    fake  returns empty tensors of the right shapes, for torch.compile
    """
    _LIBRARY.define(name + schema)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"stepgauge::{name}", fake)
    return getattr(torch.ops.stepgauge, name).default
