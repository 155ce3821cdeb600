"""The sum of parts that lie one after the other, such as the summands of several ranks.

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


def part_sum(parts: Tensor) -> Tensor:
    """Returns the sum (*) of contiguous parts (N, *) in their type, accumulated in float32.

    Has no derivative.
    """
    if not _has_kernel(parts):
        return parts.sum(0, dtype=parts.dtype)
    out = parts.new_empty(parts.shape[1:])
    kernels.part_sum(parts, out)
    return out


def _has_kernel(parts: Tensor) -> bool:
    return (
        kernels is not None
        and (parts.is_cuda or kernels.IS_INTERPRETED)
        and parts.dtype in _KERNEL_DTYPES
        and parts[0].numel() <= kernels.MOST_ELEMENTS
    )
