"""The library's collectives under names that are the same in all versions of torch that we support."""

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
    """Every rank's input, one after another, into every rank's output of N times its size."""
    return _all_gather(output, input, group=group, async_op=async_op)


def reduce_scatter_flat(
    output: Tensor,
    input: Tensor,
    group: Group = None,
    async_op: bool = False,
    op: Any = dist.ReduceOp.SUM,
) -> dist.Work | None:
    """The sum (or what `op` says) over ranks of the N-th part that is this rank's."""
    return _reduce_scatter(output, input, op=op, group=group, async_op=async_op)


def all_reduce_of(message: Tensor, operation: Any, group: dist.ProcessGroup) -> dist.Work:
    """The work of an all-reduce in place: dist.all_reduce without the checks that cost as much
    again as its launch.
    """
    return group.allreduce([message], _options(dist.AllreduceOptions, reduceOp=operation))


def all_reduce_list(
    messages: Sequence[Tensor], operation: Any, group: dist.ProcessGroup
) -> dist.Work:
    """The same of several tensors of one type and device: over NCCL one launch, and nothing is
    packed.
    """
    options = _options(dist.AllreduceCoalescedOptions, reduceOp=operation)
    return group.allreduce_coalesced(list(messages), options)


def reduce_to(owner: int, message: Tensor, operation: Any, group: dist.ProcessGroup) -> dist.Work:
    """The work of a reduction to one rank of the group, in place."""
    return group.reduce([message], _options(dist.ReduceOptions, reduceOp=operation, rootRank=owner))


def broadcast_from(owner: int, message: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """The work of sending a message of one rank of the group to all, in place."""
    message = torch.view_as_real(message) if message.is_complex() else message
    return group.broadcast([message], _options(dist.BroadcastOptions, rootRank=owner))


def all_gather_list(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Any]:
    """The works of all_gather_flat of several tensors of one type and device: over NCCL one launch.

    Over Gloo one by one: ranks of two test runs that gathered all at once ended by SIGSEGV
    (docs/log/2026-11-23-data-parallel.md).
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
    """What each launch of an asynchronous collective gives to wait for.

    Over NCCL they are one kernel, whose work all share: collectives in different directions of a
    link run at once.
    """
    if len(launches) < 2 or group._get_backend(device).name() != "nccl":
        return [launch() for launch in launches]
    with _coalescing_manager(group, device, async_ops=True) as together:
        given = [launch() for launch in launches]
    # Without any where the launches went another way than NCCL's.
    return together.works * len(launches) or given


def is_only_group(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether no other group of this process has NCCL on the device.

    The way out: a public list of a process's groups.
    """
    return not any(
        torch.device(device.type) in other._device_types
        and other._get_backend(device).name() == "nccl"
        for other in dist.distributed_c10d._world.pg_map
        if other is not group
    )


# Beside the default group there is now: what was made in it is gone with it.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]]
_groups = weakref.WeakKeyDictionary()


def group_of(backend: str) -> dist.ProcessGroup:
    """All ranks, over the backend. Made once in the life of a default group; all ranks must call."""
    world = dist.group.WORLD
    assert world is not None, "collectives run in a process group"
    made = _groups.setdefault(world, {})
    if backend not in made:
        made[backend] = dist.new_group(backend=backend)
    return made[backend]
