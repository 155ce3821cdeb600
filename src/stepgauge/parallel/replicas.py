"""What every wrapper does to a module before training: the same network on all ranks, with rank 0's
values.
"""

import itertools
from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.plan.buckets import Parameter


class DifferentModelsError(ValueError):
    """The ranks built different networks; the message names the first difference."""


def registrations() -> int:
    """How many parameters and modules have been registered anywhere: whether it is time to look."""
    return _registered


_registered = 0


def _count_registration(*_: Any) -> None:
    global _registered
    _registered += 1


register_module_parameter_registration_hook(_count_registration)
register_module_module_registration_hook(_count_registration)


def require_known(module: nn.Module, known: Container[nn.Parameter]) -> None:
    """Raises RuntimeError for a parameter that the module did not have when it was wrapped. Tensors
    that torch.func.functional_call has put in place of parameters are none.
    """
    for name, parameter in module.named_parameters():
        is_own = isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor)
        if not is_own or parameter in known:
            continue
        if parameter.is_floating_point() or parameter.is_complex():
            raise RuntimeError(
                f"{name} is no parameter that the module had when it was wrapped, and would not "
                f"be averaged; wrap the module again"
            )


def require_whole(module: nn.Module) -> None:
    """Raises ValueError for a sharded parameter, whose gradient another wrapper averages."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is sharded already, and what sharded it averages its gradient; wrap the module "
                "before any of it is sharded, or shard all of it with zero3"
            )


def device_of(module: nn.Module) -> torch.device:
    """Where it computes: of a module on the meta device, where torch's own sharding takes it to."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type != "meta":
        return device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def describe_parameter(
    name: str, parameter: Tensor, reduce_dtype: torch.dtype | None = None
) -> Parameter:
    own, sent = parameter.dtype, reduced_dtype(parameter, reduce_dtype)
    dtype = str(own).removeprefix("torch.")
    return Parameter(
        name=name,
        numel=parameter.numel(),
        bytes_per_value=sent.itemsize,
        # What is narrowed is apart from parameters that have this type themselves.
        dtype=dtype if sent == own else f"{dtype} in {sent}",
        device=str(parameter.device),
    )


def reduced_dtype(parameter: Tensor, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The type that its gradient is averaged in: a narrower floating one, or its own."""
    narrows = reduce_dtype is not None and reduce_dtype.itemsize < parameter.element_size()
    return reduce_dtype if narrows and parameter.is_floating_point() else parameter.dtype  # type: ignore[return-value]


def prepare_replicas(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, may_lack_values: bool = False
) -> None:
    """Checks that all ranks hold the same network, and gives parameters and buffers rank 0's
    values.

    may_lack_values  takes what is on the meta device as it is

    Raises DifferentModelsError, on every rank, where a name, shape, type or requires_grad differs;
    ValueError for an embedding whose forward writes its weight, and for the meta device.
    """
    _require_read_only(module)
    require_same(
        {name: _shape_of(tensor) for name, tensor in _state(module)},
        group,
        noun="parameter or buffer",
        where="model",
    )
    if not may_lack_values:
        require_values(_state(module))
    with torch.no_grad():
        works = [
            dist.broadcast(dense(tensor), group=group, group_src=0, async_op=True)
            for _, tensor in _state(module)
            if not tensor.is_meta
        ]
        for work in works:
            work.wait()


def require_values(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a tensor on the meta device."""
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values: build the module elsewhere, or shard "
                "it with zero3, which takes it so"
            )


def _require_read_only(module: nn.Module) -> None:
    """No forward may write weights: each rank's writes rows of its own batch alone."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ValueError(
                f"{path or 'the module'} has max_norm, which writes in forward the rows of one "
                "rank's batch, so that weights differ by rank; scale them after the step instead"
            )


def require_same(
    ours: dict[str, str], group: dist.ProcessGroup | None, *, noun: str, where: str
) -> None:
    """Raises DifferentModelsError, on every rank, unless all ranks gave the same names and texts in
    the same order.
    """
    everyones = gathered_objects(ours, group)
    first = everyones[0]
    for rank, theirs in enumerate(everyones):
        if list(theirs.items()) == list(first.items()):
            continue
        for name in dict.fromkeys((*first, *theirs)):
            if first.get(name) != theirs.get(name):
                raise DifferentModelsError(
                    f"the ranks' {where}s differ: {noun} {name} is {first.get(name, 'not there')} on rank 0, "
                    f"{theirs.get(name, 'not there')} on rank {rank}"
                )
        raise DifferentModelsError(
            f"the ranks' {where}s differ: rank {rank} has another order than rank 0"
        )


def _state(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers; what is a part of the whole already is no replica."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if not isinstance(tensor, DTensor):
            yield name, tensor


def _shape_of(tensor: Tensor) -> str:
    trained = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}{trained}"


def dense(tensor: Tensor) -> Tensor:
    """The tensor as collectives can write it: a dense one of permuted strides by its memory order."""
    if tensor.is_contiguous():
        return tensor.detach()
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    permuted = tensor.detach().permute(order)
    if not permuted.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not dense"
        )
    return permuted
