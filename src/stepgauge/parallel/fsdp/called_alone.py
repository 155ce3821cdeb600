"""Refuses a call of a part of a sharded module that does not come from the module's forward: the part
would compute with shards. `generate` of an encoder-decoder network calls the encoder so.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stepgauge.parallel.fsdp.sharded_unit import Place


def require_whole_weights(places: Iterable[Place], root: nn.Module) -> None:
    """Makes a call of the modules at `places`, except the root, raise RuntimeError while their weights
    are shards. Blocks need no such check, because each gathers its own weights.
    """
    for owner in dict.fromkeys(owner for owner, _ in places if owner is not root):
        owner.register_forward_pre_hook(_require_whole_weights)


def _require_whole_weights(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling():
        return
    has_shards = any(isinstance(weight, DTensor) for weight in module._parameters.values())
    # torch can compute with shards if the inputs are DTensors, too
    if has_shards and not any(isinstance(value, DTensor) for value in inputs):
        raise RuntimeError(
            f"{type(module).__name__} was called outside of the forward of the module that zero3 wraps, "
            f"while its weights are sharded: call the wrapped module, or parts of it inside "
            f"'with wrapped.whole_weights():', for example its generate"
        )
