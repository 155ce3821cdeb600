"""The library's collectives under names that are the same in all versions of torch that we support."""

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13, which warns on the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup | None


def all_gather_flat(output: Tensor, input: Tensor, group: Group = None, async_op: bool = False) -> dist.Work | None:
    """Every rank's input, one after another, into every rank's output of N times its size."""
    return _all_gather(output, input, group=group, async_op=async_op)


def reduce_scatter_flat(
    output: Tensor, input: Tensor, group: Group = None, async_op: bool = False, op: Any = dist.ReduceOp.SUM
) -> dist.Work | None:
    """The sum (or what `op` says) over ranks of the N-th part that is this rank's."""
    return _reduce_scatter(output, input, op=op, group=group, async_op=async_op)


@functools.cache
def _group(backend: str, world: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(backend=backend)


def group_of(backend: str) -> dist.ProcessGroup:
    """All ranks, over the backend. Made once a process group; all ranks must call."""
    world = dist.group.WORLD
    assert world is not None, "collectives run in a process group"
    return _group(backend, world)
