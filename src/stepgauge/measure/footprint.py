"""Counts the bytes that a training step keeps on a rank: weights, gradients, optimizer state."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stepgauge.parallel.sharding import local_part


def tensors_in(values: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists and mappings."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' storages on this rank. Each storage counts once and whole,
    also if it is shared or padded.
    """
    storages = {}
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the optimizer state on this rank."""
    inner = getattr(optimizer, "optim", optimizer)  # torch's ZeroRedundancyOptimizer
    return bytes_of(
        value
        for values in inner.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )
