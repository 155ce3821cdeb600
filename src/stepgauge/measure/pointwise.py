"""Prices elementwise operators and other passes over memory on a GPU, by the kernel that torch chooses
for their operands (aten/src/ATen/native/cuda/CUDALoops.cuh). If all operands have the same memory
layout and dtype, the kernel moves vectors of neighbouring values. Otherwise it moves one value at a
time and computes its address in each operand.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.cost.operations.terms import STRIDED_BYTES, TRAFFIC, Term

COPIES = ("clone", "copy_", "_to_copy")  # elementwise, although torch does not tag them so
# The rates of slow kernels are given as bytes per value: a plain pass (4.2 TB/s) over so many bytes
# takes as long as one value. Values per second in the trace of an eager 2.7b step on an H200: 256 G
# for operands of two dtypes, 201 G for roll, 213 G for cat of views
# (benchmarks/results/2026-11-23-h200-beside-collectives.jsonl).
MIXED_BYTES, ROLLED_BYTES, JOINED_BYTES = 16, 21, 20
# Operands that are contiguous along different dimensions: 170 G values/s, 148 to 246 in 13 calls on
# two H200s (docs/log/2026-11-24-predicted-kinds.md).
TRANSPOSED_BYTES = 25
# index_add of rows: 123 G values/s. 15,360 x 1024 in bf16 took 127 us in the trace of a step with
# experts (docs/log/2026-11-24-predicted-kinds.md).
ADDED_BYTES = 34
# Operators that copy their input, then run the in-place operator of the same name.
COPY_FIRST = ("masked_fill", "index_put", "index_add", "scatter", "scatter_add")
# Other operators that take little longer than moving their bytes, in traces and timed separately.
NEAR_THEIR_BYTES = (
    *COPIES, "roll", "cat", "masked_fill", "index_add", "native_dropout", "native_dropout_backward",
    "_softmax", "_softmax_backward_data", "select_backward", "embedding", "embedding_dense_backward",
    "new_zeros",
)  # fmt: skip


def is_near_its_bytes(func: Any) -> bool:
    """True if the operator takes about as long as passes over the bytes that it reads and writes."""
    name = func.overloadpacket.__name__.removesuffix("_")
    is_elementwise = torch.Tag.pointwise in func.tags or name.startswith("_foreach")
    return is_elementwise or name in NEAR_THEIR_BYTES


def passes(
    func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], nbytes: int
) -> Iterator[Term]:
    """Yields the kernels of an operator that moves `nbytes` and computes almost nothing."""
    name = func.overloadpacket.__name__
    if not outputs or not outputs[0].is_cuda:
        yield Term(name, TRAFFIC, (float(nbytes),))
        return
    if name == "embedding_dense_backward":
        tokens, width = inputs[0].numel() // inputs[0].shape[-1], inputs[0].shape[-1]
        written = outputs[0].numel() * outputs[0].itemsize
        yield Term(f"{name} clear", TRAFFIC, (float(written),))
        yield Term(name, "embedding backward", (tokens, width), nbytes=nbytes)
        return
    if name in COPY_FIRST:
        copied = 2 * outputs[0].numel() * outputs[0].itemsize
        yield Term(f"{name} copy", TRAFFIC, (float(copied),))
    if name == "_softmax_backward_data":  # the product of gradient and result, then its sum
        yield Term(f"{name} product", TRAFFIC, (float(nbytes),))
    if name.removesuffix("_") == "index_add":
        values = inputs[-1].numel()
        yield Term(f"{name} by index", TRAFFIC, (float(ADDED_BYTES * values),))
        return
    value_bytes = _bytes_per_value(func, name, [x for x in (*inputs, *outputs) if x.is_cuda])
    equivalent = value_bytes * outputs[0].numel()
    suffix = ""
    if equivalent > nbytes:
        suffix = " of two types" if value_bytes == MIXED_BYTES else " of views"
    yield Term(name + suffix, TRAFFIC, (float(max(equivalent, nbytes)),))


def contiguous_copies(name: str, inputs: Sequence[Tensor]) -> Iterator[Term]:
    """Yields the copies of inputs that are not contiguous, before kernels that need contiguous rows."""
    for x in inputs:
        if x.is_cuda and not x.is_contiguous():
            value_bytes = STRIDED_BYTES if x.stride(-1) == 1 else TRANSPOSED_BYTES
            yield Term(f"{name} copy", TRAFFIC, (float(value_bytes * x.numel()),))


def _bytes_per_value(func: Any, name: str, operands: Sequence[Tensor]) -> int:
    """Returns the bytes of a plain pass that takes as long as one value; 0 if it is a plain pass."""
    views = [x for x in operands if not x.is_contiguous()]
    if name == "roll":  # copies a view first
        return ROLLED_BYTES + (STRIDED_BYTES if views else 0)
    if name == "cat":
        return JOINED_BYTES if views else 0
    if torch.Tag.pointwise not in func.tags and name not in COPIES:
        return 0
    if len({x.dtype for x in operands if x.is_floating_point()}) > 1:
        return MIXED_BYTES
    if _have_same_dense_layout(operands):
        return 0
    return TRANSPOSED_BYTES if len(_contiguous_dims(operands)) > 1 else STRIDED_BYTES


def _have_same_dense_layout(operands: Sequence[Tensor]) -> bool:
    """True if all operands have the same order of values in memory, without gaps."""
    first, *others = map(_sizes_and_strides, operands)
    dense_stride = 1
    for size, stride in sorted(first, key=lambda each: each[1]):
        if stride != dense_stride:
            return False
        dense_stride *= size
    return all(other == first for other in others)


def _contiguous_dims(operands: Sequence[Tensor]) -> set[int]:
    """Returns the dims, counted from the last, along which an operand has stride 1. An expanded tensor
    may have none.
    """
    return {
        dim - x.ndim
        for x in operands
        for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True))
        if size > 1 and stride == 1
    }


def _sizes_and_strides(x: Tensor) -> list[tuple[int, int]]:
    """Returns (size, stride) of each dim with more than one value."""
    return [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
