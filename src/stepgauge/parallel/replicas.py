"""Prepares a module for data parallel training: checks that all ranks have the same network, and gives
it rank 0's values.
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
    """Returns how many parameters and modules have been registered in any module of this process.
    While the number stays the same, no module has got another parameter.
    """
    return _num_registrations


_num_registrations = 0


def _count_registration(*_: Any) -> None:
    global _num_registrations
    _num_registrations += 1


register_module_parameter_registration_hook(_count_registration)
register_module_module_registration_hook(_count_registration)


def require_known(module: nn.Module, known: Container[nn.Parameter]) -> None:
    """Raises RuntimeError for an unsharded parameter that the module did not have when it was wrapped.
    Tensors that torch.func.functional_call puts in place of parameters do not count.
    """
    for name, parameter in module.named_parameters():
        is_whole = isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor)
        if not is_whole or parameter in known:
            continue
        if parameter.is_floating_point() or parameter.is_complex():
            raise RuntimeError(
                f"{name} was not a parameter of the module when it was wrapped, so its gradient "
                f"would not be averaged; wrap the module again"
            )


def require_whole(module: nn.Module) -> None:
    """Raises ValueError for a sharded parameter, whose gradient another wrapper averages."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is sharded already, so another wrapper averages its gradient; wrap the module "
                "before any of it is sharded, or shard all of it with zero3"
            )


def device_of(module: nn.Module) -> torch.device:
    """Returns the device that the module computes on. For a module on the meta device this is the
    current accelerator, as in torch's fully_shard.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type != "meta":
        return device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def describe_parameter(
    name: str, parameter: Tensor, reduce_dtype: torch.dtype | None = None
) -> Parameter:
    """Describes a parameter for the plans in spec/plan."""
    own, sent = parameter.dtype, reduced_dtype(parameter, reduce_dtype)
    dtype = str(own).removeprefix("torch.")
    return Parameter(
        name=name,
        numel=parameter.numel(),
        bytes_per_value=sent.itemsize,
        # Gradients cast to a dtype do not share buckets with those of parameters in that dtype.
        dtype=dtype if sent == own else f"{dtype} in {sent}",
        device=str(parameter.device),
    )


def reduced_dtype(parameter: Tensor, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which a parameter's gradient is averaged: reduce_dtype if the parameter is
    floating-point and wider, else the parameter's own.
    """
    narrows = reduce_dtype is not None and reduce_dtype.itemsize < parameter.element_size()
    return reduce_dtype if narrows and parameter.is_floating_point() else parameter.dtype  # type: ignore[return-value]


def prepare_replicas(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, may_lack_values: bool = False
) -> None:
    """Checks that all ranks hold the same network, and broadcasts rank 0's parameters and buffers.

    may_lack_values  accepts tensors on the meta device, which are not broadcast

    Raises DifferentModelsError, on every rank, if a name, shape, dtype or requires_grad differs;
    ValueError for an embedding whose forward writes its weight, and for the meta device.
    """
    _require_read_only(module)
    require_same(
        {name: _description_of(tensor) for name, tensor in _replicated(module)},
        group,
        noun="parameter or buffer",
        where="model",
    )
    if not may_lack_values:
        require_values(_replicated(module))
    with torch.no_grad():
        works = [
            dist.broadcast(dense(tensor), group=group, group_src=0, async_op=True)
            for _, tensor in _replicated(module)
            if not tensor.is_meta
        ]
        for work in works:
            work.wait()


def require_values(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a tensor on the meta device."""
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values: build the module on another device, "
                "or shard it with zero3, which accepts the meta device"
            )


def _require_read_only(module: nn.Module) -> None:
    """Raises ValueError for a module whose forward writes its weights."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ValueError(
                f"{path or 'the module'} has max_norm: its forward scales the rows that one rank's "
                "batch looks up, so the ranks' weights would differ; scale them after the step instead"
            )


def require_same(
    descriptions: dict[str, str], group: dist.ProcessGroup | None, *, noun: str, where: str
) -> None:
    """Raises DifferentModelsError, on every rank, unless all ranks pass the same descriptions, by
    name, in the same order.
    """
    first, *others = gathered_objects(descriptions, group)
    for rank, other in enumerate(others, start=1):
        if list(other.items()) == list(first.items()):
            continue
        for name in dict.fromkeys((*first, *other)):
            if first.get(name) != other.get(name):
                raise DifferentModelsError(
                    f"the ranks' {where}s differ: {noun} {name} is {first.get(name, 'missing')} on "
                    f"rank 0, {other.get(name, 'missing')} on rank {rank}"
                )
        raise DifferentModelsError(
            f"the ranks' {where}s differ: rank {rank} has its {noun}s in another order than rank 0"
        )


def _replicated(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yields the parameters and buffers that are not sharded."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if not isinstance(tensor, DTensor):
            yield name, tensor


def _description_of(tensor: Tensor) -> str:
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)} on {tensor.device.type}{frozen}"


def dense(tensor: Tensor) -> Tensor:
    """Returns a contiguous view of the tensor that collectives can write: one with permuted strides is
    viewed in memory order. Raises ValueError for a tensor with gaps.
    """
    if tensor.is_contiguous():
        return tensor.detach()
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    permuted = tensor.detach().permute(order)
    if not permuted.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not dense"
        )
    return permuted
