"""What passes over memory take on a GPU, by the kernel that torch chooses for their operands
(aten/src/ATen/native/cuda/CUDALoops.cuh): vectors of neighbours where all operands lie alike, else
one value at a time, whose place in each operand is computed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.cost.operations.terms import STRIDED_BYTES, TRAFFIC, Term

COPIES = ("clone", "copy_", "_to_copy")  # elementwise, whatever torch's tags say
# Bytes of a plain pass (4.2 TB/s there) that takes as long as a value: of operands of two types 256 G
# values/s, of a roll 201, of views put together 213 in the trace of an eager 2.7b step on an H200
# (benchmarks/results/2026-11-23-h200-beside-collectives.jsonl).
MIXED_BYTES, ROLLED_BYTES, JOINED_BYTES = 16, 21, 20
# Of operands whose values lie beside one another along different dimensions: 170 G values/s, 148 to 246
# of 13 such calls on two H200s (docs/log/2026-11-24-predicted-kinds.md).
TRANSPOSED_BYTES = 25
# Of rows that are added to others at places that an index gives, 123 G values/s: 15,360 x 1024 in bf16
# took 127 us in the trace of a step with experts (docs/log/2026-11-24-predicted-kinds.md).
ADDED_BYTES = 34
# They copy their input, and then run the operator of the same name that changes it in place.
COPY_FIRST = ("masked_fill", "index_put", "index_add", "scatter", "scatter_add")
# Others whose kernels take hardly longer than their bytes: seen in traces, and timed by themselves.
NEAR_THEIR_BYTES = (
    *COPIES, "roll", "cat", "masked_fill", "index_add", "native_dropout", "native_dropout_backward",
    "_softmax", "_softmax_backward_data", "select_backward", "embedding", "embedding_dense_backward",
    "new_zeros",
)  # fmt: skip


def is_near_its_bytes(func: Any) -> bool:
    """Whether an operator takes about as long as passes over what it reads and writes."""
    name = func.overloadpacket.__name__.removesuffix("_")
    is_elementwise = torch.Tag.pointwise in func.tags or name.startswith("_foreach")
    return is_elementwise or name in NEAR_THEIR_BYTES


def passes(
    func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], nbytes: int
) -> Iterator[Term]:
    """The kernels of an operator that reads and writes so many bytes, and computes next to nothing."""
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
    if name == "_softmax_backward_data":  # a product of gradient and result, then what sums it
        yield Term(f"{name} product", TRAFFIC, (float(nbytes),))
    if name.removesuffix("_") == "index_add":
        values = inputs[-1].numel()
        yield Term(f"{name} by index", TRAFFIC, (float(ADDED_BYTES * values),))
        return
    a_value = _bytes_a_value(func, name, [x for x in (*inputs, *outputs) if x.is_cuda])
    as_long = a_value * outputs[0].numel()
    slower = "" if as_long <= nbytes else " of two types" if a_value == MIXED_BYTES else " of views"
    yield Term(name + slower, TRAFFIC, (float(max(as_long, nbytes)),))


def copied_first(name: str, inputs: Sequence[Tensor]) -> Iterator[Term]:
    """Copies of what is not contiguous, for kernels that read rows of neighbours."""
    for x in inputs:
        if x.is_cuda and not x.is_contiguous():
            a_value = STRIDED_BYTES if x.stride(-1) == 1 else TRANSPOSED_BYTES
            yield Term(f"{name} copy", TRAFFIC, (float(a_value * x.numel()),))


def _bytes_a_value(func: Any, name: str, operands: Sequence[Tensor]) -> int:
    """Of a plain pass that takes as long; 0 for an operator that is one."""
    views = [x for x in operands if not x.is_contiguous()]
    if name == "roll":  # which first copies a view
        return ROLLED_BYTES + (STRIDED_BYTES if views else 0)
    if name == "cat":
        return JOINED_BYTES if views else 0
    if torch.Tag.pointwise not in func.tags and name not in COPIES:
        return 0
    if len({x.dtype for x in operands if x.is_floating_point()}) > 1:
        return MIXED_BYTES
    if _lie_alike(operands):
        return 0
    return TRANSPOSED_BYTES if len(_dimensions_of_neighbours(operands)) > 1 else STRIDED_BYTES


def _lie_alike(operands: Sequence[Tensor]) -> bool:
    """Whether all have the same values beside one another, with no gaps."""
    first, *others = map(_sizes_and_steps, operands)
    reached = 1
    for size, step in sorted(first, key=lambda each: each[1]):
        if step != reached:
            return False
        reached *= size
    return all(other == first for other in others)


def _dimensions_of_neighbours(operands: Sequence[Tensor]) -> set[int]:
    """Along which each has its values beside one another, from the last; of an expanded one none."""
    return {
        place - x.ndim
        for x in operands
        for place, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True))
        if size > 1 and step == 1
    }


def _sizes_and_steps(x: Tensor) -> list[tuple[int, int]]:
    """Of each dimension with several values."""
    return [(size, step) for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]
