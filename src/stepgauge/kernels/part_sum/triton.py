"""The sum of N parts in one pass over memory.

The lower bound is N + 1 times the bytes of a part: 84 MB for 4 parts of 2048 x 4096 in bf16, which take
20 us at the 4.2 TB/s of a copy on an H200; that is also what it takes.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgauge.kernels.launch import Launch

BLOCK, NUM_WARPS = 2048, 4
MOST_ELEMENTS = 2**31 - 1  # of a batch of a part, which are counted in 32 bits
MOST_VECTOR = 8  # elements that a thread loads at once: 16 bytes in bf16


@triton.jit(do_not_specialize=["vectors", "stride", "own_stride", "rank"])
def part_sum_kernel(
    parts_ptr,
    own_ptr,
    out_ptr,
    vectors,
    stride,
    own_stride,
    rank,
    NUM_PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums a block of elements of one batch in float32.

    Counts and strides are given in units of VECTOR elements: as the compiler knows a factor of theirs,
    it can load so many elements at once.

    vectors     elements of a batch
    stride      from a part to the next
    own_stride  from a batch of `own` to the next
    rank        the part that is `own` instead
    """
    batch = tl.program_id(1).to(tl.int64)
    numel = vectors * VECTOR
    index_M = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask_M = index_M < numel
    own_M = tl.load(own_ptr + batch * own_stride * VECTOR + index_M, mask=mask_M, other=0.0)
    parts_ptr += batch * numel
    sum_M = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        part_M = tl.load(parts_ptr + index_M, mask=mask_M & (part != rank), other=0.0)
        sum_M += tl.where(part == rank, own_M, part_M).to(tl.float32)
        parts_ptr += stride.to(tl.int64) * VECTOR
    tl.store(out_ptr + batch * numel + index_M, sum_M.to(out_ptr.dtype.element_ty), mask=mask_M)


IS_INTERPRETED = not isinstance(part_sum_kernel, triton.runtime.JITFunction)


@functools.cache
def _launch_for(num_parts: int, vector: int, dtype: torch.dtype, device: torch.device) -> Launch:
    return Launch(
        part_sum_kernel, NUM_PARTS=num_parts, VECTOR=vector, BLOCK=BLOCK, num_warps=NUM_WARPS
    )


def part_sum(parts: Tensor, own: Tensor, rank: int, out: Tensor) -> None:
    """Writes to `out` (B, *) what kernels.part_sum.part_sum returns."""
    if not out.numel():
        return
    numel, own_stride, stride = own[0].numel(), own.stride(0), out.numel()
    vector = math.gcd(numel, own_stride, MOST_VECTOR)
    launch = _launch_for(parts.shape[0], vector, parts.dtype, parts.device)
    grid = triton.cdiv(numel, BLOCK), own.shape[0]
    counts = (numel // vector, stride // vector, own_stride // vector, rank)
    launch(grid, (parts, own, out), counts)
