"""Calls of torch's operators as text, so that what a traced step runs can be timed by itself, elsewhere:
the operator's name, and its arguments in JSON with shape, strides and type in place of values.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.measure.footprint import tensors_in


class _UnwritableError(Exception):
    """A call that cannot be made again: values decide what it does, or an argument is no plain one."""


LEAST_BYTES = 2**20  # of tensors in a call that is worth its own time
MOST_LENGTH = 2000  # of a text: an optimizer's lists of all weights are not


def _along(args: Sequence[Any]) -> list[int]:
    """Places in the dimension that the second argument names."""
    return [args[0].shape[args[1]]]


def _in_each(args: Sequence[Any]) -> list[int]:
    """A list of places, one a dimension. Of a mask as many are read as it has values that are true."""
    if any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1])):
        raise _UnwritableError
    return list(args[0].shape)


def _in_table(args: Sequence[Any]) -> list[int]:
    return [args[0].shape[0]]


ALONG = ("index_add", "index_select", "index_copy", "gather", "scatter", "scatter_add")
IN_EACH = ("index", "index_put")
# What integers are below, by operator and argument; values of others are not known.
BELOW: Mapping[str, Mapping[int, Callable[[Sequence[Any]], list[int]]]] = {
    **{name: {2: _along} for name in ALONG},
    **{name: {1: _in_each} for name in IN_EACH},
    "embedding": {1: _in_table},
    "embedding_dense_backward": {1: lambda args: [args[2]]},
    "_embedding_bag_backward": {  # indices, offsets, the bag of each, sizes of bags
        1: lambda args: [args[6]],
        2: lambda args: [1],
        3: lambda args: [args[0].shape[0]],
        4: lambda args: [2],
    },
    "max_pool2d_with_indices_backward": {7: lambda args: [math.prod(args[1].shape[-2:])]},
}
# Values decide what they do, or some values are refused, which leaves a GPU's context unusable.
BY_VALUE = (
    "nonzero", "masked_select", "unique", "_unique", "multinomial", "bernoulli.", "bernoulli_.Tensor",
    "normal.", "poisson", "binary_cross_entropy.", "binary_cross_entropy_backward.",
)  # fmt: skip


def text_of(func: Any, args: Sequence[Any], kwargs: Any) -> str:
    """The call; "" for one that cannot be made again from its text, or is too small to be timed."""
    full = str(func).removeprefix("aten.")
    if full.startswith(BY_VALUE) or not is_long((args, kwargs)):
        return ""
    name = func.overloadpacket.__name__.removesuffix("_")
    try:
        bounds = {place: of(args) for place, of in BELOW.get(name, {}).items()}
        written = (
            [_written(value, bounds.get(place, [])) for place, value in enumerate(args)],
            {key: _written(value, []) for key, value in (kwargs or {}).items()},
        )
    except (_UnwritableError, IndexError):
        return ""
    text = f"{full} {json.dumps(written, separators=(',', ':'))}"
    return text if len(text) <= MOST_LENGTH else ""


def is_long(values: Any) -> bool:
    """Whether a call with these tensors is worth its own time."""
    return sum(x.numel() * x.itemsize for x in tensors_in(values)) >= LEAST_BYTES


def call_of(text: str, device: torch.device) -> tuple[Callable[[], tuple[Any, Any]], Any]:
    """A function that makes arguments for the call, and the operator that takes them."""
    name, _, written = text.partition(" ")
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    args, kwargs = json.loads(written)

    def operands() -> tuple[Any, Any]:
        return _read(args, device), _read(kwargs, device)

    return operands, operator


def _written(value: Any, bounds: list[int]) -> Any:
    """`bounds`: what integers of a tensor are below, or those of each tensor of a list."""
    match value:
        case Tensor():
            return _written_tensor(value, bounds[0] if bounds else 0)
        case list() | tuple():
            return [_written(each, bounds[n : n + 1]) for n, each in enumerate(value)]
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(value).removeprefix("torch.")}
        case torch.device():
            return {"on": value.type}
        case None | bool() | int() | float() | str():
            return value
    raise _UnwritableError


def _written_tensor(x: Tensor, below: int) -> dict[str, Any]:
    is_index = not x.is_floating_point() and x.dtype != torch.bool and x.numel() > 1
    if x.is_complex() or (is_index and not below):
        raise _UnwritableError
    return {
        "type": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        "stride": list(x.stride()),
        "below": below,
        "cpu": x.device.type == "cpu",
    }


def _read(written: Any, device: torch.device) -> Any:
    match written:
        case {"shape": shape, "stride": stride, "type": dtype, "below": below, "cpu": on_cpu}:
            where = torch.device("cpu") if on_cpu and not shape else device
            return _tensor(shape, stride, getattr(torch, dtype), below, where)
        case {"torch": name}:
            return getattr(torch, name)
        case {"on": kind}:
            return torch.device("cpu") if kind == "cpu" else device
        case dict():
            return {key: _read(value, device) for key, value in written.items()}
        case list():
            return [_read(each, device) for each in written]
    return written


def _tensor(
    shape: list[int], stride: list[int], dtype: torch.dtype, below: int, device: torch.device
) -> Tensor:
    reached = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    length = reached if math.prod(shape) else 0
    if dtype.is_floating_point:
        storage = torch.randn(length, device=device).to(dtype)
    elif dtype == torch.bool:
        storage = torch.rand(length, device=device) < 0.5
    else:
        storage = torch.randint(max(1, below), (length,), device=device, dtype=dtype)
    return storage.as_strided(shape, stride)
