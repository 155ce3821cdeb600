"""Writes calls of torch's operators as text, so that calls of a traced step can be timed separately on
another machine. The text is the operator's name and its arguments in JSON, in which tensors have shape,
strides and dtype instead of values.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.measure.footprint import tensors_in


class _UnwritableError(Exception):
    """The call cannot be repeated: its work depends on values, or an argument cannot be written."""


LEAST_BYTES = 2**20  # a call with smaller tensors is not timed separately
MOST_LENGTH = 2000  # longer texts are dropped, such as an optimizer's lists of all weights


def _size_of_dim(args: Sequence[Any]) -> list[int]:
    """The limit of an index along the dim that the second argument names."""
    return [args[0].shape[args[1]]]


def _size_of_each_dim(args: Sequence[Any]) -> list[int]:
    """The limits of a list of indices, one per dim. Masks are rejected: how much they select depends
    on their values.
    """
    if any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1])):
        raise _UnwritableError
    return list(args[0].shape)


ALONG_DIM = ("index_add", "index_select", "index_copy", "gather", "scatter", "scatter_add")
EACH_DIM = ("index", "index_put")
# Upper limits of index arguments, by operator and argument position. The values of other integer
# tensors are unknown.
INDEX_LIMITS: Mapping[str, Mapping[int, Callable[[Sequence[Any]], list[int]]]] = {
    **{name: {2: _size_of_dim} for name in ALONG_DIM},
    **{name: {1: _size_of_each_dim} for name in EACH_DIM},
    "embedding": {1: lambda args: [args[0].shape[0]]},
    "embedding_dense_backward": {1: lambda args: [args[2]]},
    "_embedding_bag_backward": {  # indices, offsets, the bag of each index, sizes of bags
        1: lambda args: [args[6]],
        2: lambda args: [1],
        3: lambda args: [args[0].shape[0]],
        4: lambda args: [2],
    },
    "max_pool2d_with_indices_backward": {7: lambda args: [math.prod(args[1].shape[-2:])]},
}
# The work of these depends on values, or they reject some values, which makes a CUDA context unusable.
VALUE_DEPENDENT = (
    "nonzero", "masked_select", "unique", "_unique", "multinomial", "bernoulli.", "bernoulli_.Tensor",
    "normal.", "poisson", "binary_cross_entropy.", "binary_cross_entropy_backward.",
)  # fmt: skip


def text_of(func: Any, args: Sequence[Any], kwargs: Any) -> str:
    """Returns the call as text, or "" if it cannot be repeated from a text or is too small to time."""
    full_name = str(func).removeprefix("aten.")
    if full_name.startswith(VALUE_DEPENDENT) or not is_large((args, kwargs)):
        return ""
    name = func.overloadpacket.__name__.removesuffix("_")
    try:
        limits = {position: of(args) for position, of in INDEX_LIMITS.get(name, {}).items()}
        encoded = (
            [_encode(value, limits.get(position, [])) for position, value in enumerate(args)],
            {key: _encode(value, []) for key, value in (kwargs or {}).items()},
        )
    except (_UnwritableError, IndexError):
        return ""
    text = f"{full_name} {json.dumps(encoded, separators=(',', ':'))}"
    return text if len(text) <= MOST_LENGTH else ""


def is_large(values: Any) -> bool:
    """True if a call with these tensors is large enough to be timed separately."""
    return sum(x.numel() * x.itemsize for x in tensors_in(values)) >= LEAST_BYTES


def call_of(text: str, device: torch.device) -> tuple[Callable[[], tuple[Any, Any]], Any]:
    """Returns a function that makes (args, kwargs) of the call, and the operator that takes them."""
    name, _, encoded = text.partition(" ")
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    args, kwargs = json.loads(encoded)

    def operands() -> tuple[Any, Any]:
        return _decode(args, device), _decode(kwargs, device)

    return operands, operator


def _encode(value: Any, limits: list[int]) -> Any:
    """Encodes an argument for JSON.

    limits  the upper limit of an integer tensor's values, or those of the tensors in a list
    """
    match value:
        case Tensor():
            return _encode_tensor(value, limits[0] if limits else 0)
        case list() | tuple():
            return [_encode(each, limits[n : n + 1]) for n, each in enumerate(value)]
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(value).removeprefix("torch.")}
        case torch.device():
            return {"on": value.type}
        case None | bool() | int() | float() | str():
            return value
    raise _UnwritableError


def _encode_tensor(x: Tensor, below: int) -> dict[str, Any]:
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


def _decode(encoded: Any, device: torch.device) -> Any:
    """Decodes an argument; tensors are created on the device, scalar tensors of the CPU on the CPU."""
    match encoded:
        case {"shape": shape, "stride": stride, "type": dtype, "below": below, "cpu": on_cpu}:
            where = torch.device("cpu") if on_cpu and not shape else device
            return _random_tensor(shape, stride, getattr(torch, dtype), below, where)
        case {"torch": name}:
            return getattr(torch, name)
        case {"on": kind}:
            return torch.device("cpu") if kind == "cpu" else device
        case dict():
            return {key: _decode(value, device) for key, value in encoded.items()}
        case list():
            return [_decode(each, device) for each in encoded]
    return encoded


def _random_tensor(
    shape: list[int], strides: list[int], dtype: torch.dtype, below: int, device: torch.device
) -> Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    length = extent if math.prod(shape) else 0
    if dtype.is_floating_point:
        storage = torch.randn(length, device=device).to(dtype)
    elif dtype == torch.bool:
        storage = torch.rand(length, device=device) < 0.5
    else:
        storage = torch.randint(max(1, below), (length,), device=device, dtype=dtype)
    return storage.as_strided(shape, strides)
