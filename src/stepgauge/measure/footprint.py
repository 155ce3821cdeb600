"""Bytes of what a training step keeps on a rank: weights, gradients, optimizer state."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stepgauge.parallel.sharding import local_part


def tensors_in(values: Any) -> list[Tensor]:
    """Those of a tuple, list or mapping of tensors and others, however deep."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the storages on this rank, each once; storage that is shared or padded counts whole."""
    storages = {}
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the state that this rank keeps, also where the optimizer wraps another one."""
    inner = getattr(optimizer, "optim", optimizer)  # torch's ZeroRedundancyOptimizer
    return bytes_of(
        value
        for values in inner.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )
