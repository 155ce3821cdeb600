"""Operators of our own, into which a compiler does not look and of which checkpointing keeps results.

By torch.library's plain functions: its custom_op costs more host time than what small ones launch.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("stepgauge", "FRAGMENT")


def define_operator(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None
) -> Any:
    """torch.ops.stepgauge.<name>, which `run` computes on every device, without a gradient.

    fake  gives empty tensors of the shapes, for torch.compile; None: nobody compiles it
    """
    _LIBRARY.define(name + schema)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, device)
    if fake is not None:
        torch.library.register_fake(f"stepgauge::{name}", fake)
    return getattr(torch.ops.stepgauge, name).default
