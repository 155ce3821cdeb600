"""The collectives of torch.distributed, under names that work with every supported version of torch."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

# Renamed in torch 2.13, which warns on the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup | None


def all_gather_flat(
    output: Tensor, input: Tensor, group: Group = None, async_op: bool = False
) -> dist.Work | None:
    """Writes the inputs of all N ranks, in rank order, into every rank's output of N times the size."""
    return _all_gather(output, input, group=group, async_op=async_op)


def reduce_scatter_flat(
    output: Tensor,
    input: Tensor,
    group: Group = None,
    async_op: bool = False,
    op: Any = dist.ReduceOp.SUM,
) -> dist.Work | None:
    """Writes this rank's N-th of the input, summed over the N ranks (or reduced with `op`)."""
    return _reduce_scatter(output, input, op=op, group=group, async_op=async_op)


def launch_all_reduce(message: Tensor, operation: Any, group: dist.ProcessGroup) -> dist.Work:
    """Starts an all-reduce in place. dist.all_reduce does the same, but its checks double the host
    time of the launch.
    """
    return group.allreduce([message], _options(dist.AllreduceOptions, reduceOp=operation))


def launch_all_reduce_list(
    messages: Sequence[Tensor], operation: Any, group: dist.ProcessGroup
) -> dist.Work:
    """Starts an all-reduce in place of several tensors of one dtype and device. Over NCCL this is a
    single launch without packing.
    """
    options = _options(dist.AllreduceCoalescedOptions, reduceOp=operation)
    return group.allreduce_coalesced(list(messages), options)


def launch_reduce(
    owner: int, message: Tensor, operation: Any, group: dist.ProcessGroup
) -> dist.Work:
    """Starts a reduce in place to rank `owner` of the group."""
    return group.reduce([message], _options(dist.ReduceOptions, reduceOp=operation, rootRank=owner))


def launch_broadcast(owner: int, message: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts a broadcast in place from rank `owner` of the group."""
    message = torch.view_as_real(message) if message.is_complex() else message
    return group.broadcast([message], _options(dist.BroadcastOptions, rootRank=owner))


def launch_all_gather_list(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Any]:
    """Starts all_gather_flat of several tensors of one dtype and device; returns the works to wait
    for. Over NCCL this is a single launch.

    Over Gloo the tensors are gathered one by one: ranks of two test runs that gathered all of them
    at once ended with SIGSEGV (docs/log/2026-11-23-data-parallel.md).
    """
    if group._get_backend(outputs[0].device).name() == "gloo":
        pairs = zip(outputs, inputs, strict=True)
        return [all_gather_flat(output, part, group, True) for output, part in pairs]
    # Renamed in torch 2.13.
    gather: Any = getattr(group, "all_gather_single_coalesced", None)
    gather = gather or group.allgather_into_tensor_coalesced
    return [gather(list(outputs), list(inputs), _options(dist.distributed_c10d.AllgatherOptions))]


@functools.cache
def _options(kind: type, **fields: Any) -> Any:
    options = kind()
    options.asyncOp = True
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def launch_together(
    launches: Sequence[Callable[[], Any]], *, group: dist.ProcessGroup, device: torch.device
) -> list[Any]:
    """Launches several asynchronous collectives and returns the work of each.

    Over NCCL they become one kernel, and all of them share its work: collectives in different
    directions of a link then run at the same time.
    """
    if len(launches) < 2 or group._get_backend(device).name() != "nccl":
        return [launch() for launch in launches]
    with _coalescing_manager(group, device, async_ops=True) as together:
        works = [launch() for launch in launches]
    # The manager has no work if the launches did not go through NCCL.
    return together.works * len(launches) or works


def is_only_group(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns True if no other process group of this process uses NCCL on the device.

    The way out: a public list of a process's groups.
    """
    return not any(
        torch.device(device.type) in other._device_types
        and other._get_backend(device).name() == "nccl"
        for other in dist.distributed_c10d._world.pg_map
        if other is not group
    )


# The groups that `group_with_backend` made, by default group: they are destroyed together with it.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]]
_groups = weakref.WeakKeyDictionary()


def group_with_backend(backend: str) -> dist.ProcessGroup:
    """Returns a group of all ranks with the backend. It is made once for each default group; all
    ranks must call this.
    """
    world = dist.group.WORLD
    assert world is not None, "collectives run in a process group"
    by_backend = _groups.setdefault(world, {})
    if backend not in by_backend:
        by_backend[backend] = dist.new_group(backend=backend)
    return by_backend[backend]
