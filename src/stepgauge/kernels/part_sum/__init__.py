"""The sum of what several ranks computed, where a rank's own part is not next to the received ones.

torch's sum over a first dimension of 2 reached 1.2 of the 4.2 TB/s of a copy on an H200
(docs/log/2026-11-28-zero3-by-copies.md). The Triton kernel here is for CUDA tensors in float32, bfloat16
and float16; other tensors, and all tensors if Triton is not installed, use torch's sum.
"""

import importlib.util

import torch
from torch import Tensor

if importlib.util.find_spec("triton") is not None:
    from . import triton as kernels
else:  # use torch's sum
    kernels = None

__all__ = ["part_sum"]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def part_sum(parts: Tensor, own: Tensor, rank: int) -> Tensor:
    """Returns the sum of contiguous parts (N, *), of which `own` is the one of that rank; what
    parts[rank] holds does not count. Sums of 16 bits are accumulated in 32. It has no derivative.
    """
    if not _has_kernel(own):
        parts[rank].copy_(own)
        return parts.sum(0, dtype=parts.dtype)
    out = parts.new_empty(parts.shape[1:])
    kernels.part_sum(parts, own.contiguous(), rank, out)
    return out


def _has_kernel(own: Tensor) -> bool:
    return (
        kernels is not None
        and (own.is_cuda or kernels.IS_INTERPRETED)
        and own.dtype in _KERNEL_DTYPES
        and own.numel() <= kernels.MOST_ELEMENTS
    )
