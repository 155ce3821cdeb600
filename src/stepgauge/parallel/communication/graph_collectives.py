"""Collectives that torch.compile keeps in its graphs: they return new tensors. Those that write into
their argument would break a graph. Autograd does not follow them.

Legend: M other ranks, in the order of ranks.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor

# The operators behind torch.distributed._functional_collectives.
_ops = torch.ops._c10d_functional


def _below_autograd() -> contextlib.AbstractContextManager[object]:
    """Skips the autograd formulas that torch registers in Python for these operators: a gather takes the host
    7 instead of 19 us. The way out: leave this context out, which changes no result.
    """
    if torch.compiler.is_compiling():  # the graph has no formulas
        return contextlib.nullcontext()
    return torch._C._AutoDispatchBelowAutograd()


def all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """Returns the sum (or another `operation`) over ranks as a new tensor."""
    with _below_autograd():
        return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, group.group_name))


def over_ranks(x: Tensor, group: dist.ProcessGroup | None, operation: str = "sum") -> Tensor:
    """Like `all_reduce`, but returns x itself without a group."""
    return x if group is None else all_reduce(x, group, operation)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the rows of all ranks: their tensors one after another along dim 0."""
    with _below_autograd():
        return _ops.wait_tensor(
            _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
        )


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's rows, its part of dim 0, of the sum over ranks."""
    with _below_autograd():
        return _ops.wait_tensor(
            _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)
        )


def exchange_with_others(x_M: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Starts to send x[m] to the m-th other rank. Returns y, where y[m] comes from the m-th other rank;
    read it only after `wait_for`.
    """
    rows = [int(rank != group.rank()) for rank in range(group.size())]
    with _below_autograd():
        y_M: Tensor = _ops.all_to_all_single(x_M, rows, rows, group.group_name)
    return y_M


def wait_for(y: Tensor) -> Tensor:
    """Returns y, once the current stream has waited for the collective that writes it."""
    with _below_autograd():
        waited: Tensor = _ops.wait_tensor(y)
    return waited
