"""Rotary positions for queries, keys and values of one matrix product, with a single kernel for
backward.

A compiled model calls ``rotated_heads``. The equations are in reference.py. The forward is plain
operations, which torch.compile fuses. For backward, Inductor concatenates the three gradients with a
kernel that reads its inputs several times: for 8 x 2048 x 75 heads of 64 in bf16 it took 229 us,
while one pass over the bytes takes 75 us (one H200, docs/log/2026-11-23-hopper-steps.md).

CUDA tensors in float32, bfloat16 and float16 with tables of the same type use the Triton kernel.
Other tensors, and all tensors if Triton is not installed, use plain PyTorch. Legend: reference.py.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .reference import rotate

if importlib.util.find_spec("triton") is not None:
    from . import triton as kernels
else:  # use the reference
    kernels = None

__all__ = ["rotate", "rotated_heads"]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rotated_heads(
    heads_BTSW: Tensor, num: Sequence[int], cos_TR: Tensor, sin_TR: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the heads into q_BTHW, k_BTKW and v_BTKW, with `num` heads each, and rotates q and k.

    A second derivative raises with the kernel; the plain PyTorch version supports it.
    """
    if _has_kernel(heads_BTSW, cos_TR):
        return _RotatedHeads.apply(heads_BTSW, num, cos_TR, sin_TR)
    return _plain(heads_BTSW, num, cos_TR, sin_TR)


def _has_kernel(heads: Tensor, cos: Tensor) -> bool:
    """Returns True if the kernel can be used. It needs gradients of one type, but tables of another
    type would widen queries and keys and not values.
    """
    is_one_type = heads.dtype == cos.dtype and heads.dtype in _KERNEL_DTYPES
    return heads.is_cuda and kernels is not None and is_one_type


def _plain(heads_BTSW, num, cos_TR, sin_TR):
    q_BTHW, k_BTKW, v_BTKW = heads_BTSW.split(list(num), dim=2)
    tables = cos_TR[:, None], sin_TR[:, None]
    return rotate(q_BTHW, *tables), rotate(k_BTKW, *tables), v_BTKW


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads, num, cos, sin):
        ctx.save_for_backward(cos, sin)
        q, k, v = _plain(heads, num, cos, sin)
        return q, k, v.clone()

    @staticmethod
    def backward(ctx, dq, dk, dv):
        return torch.ops.stepgauge.rotary_backward(dq, dk, dv, *ctx.saved_tensors), *[None] * 3


@torch.library.custom_op("stepgauge::rotary_backward", mutates_args=())
def rotary_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of heads_BTSW, in dv's type."""
    if kernels is None or not (dq.is_cuda or kernels.IS_INTERPRETED):
        return reference.backward(dq, dk, dv, cos, sin)
    out = _like_all_heads(dq, dk, dv)
    parts = (part if part.stride(-1) == 1 else part.contiguous() for part in (dq, dk, dv))
    kernels.backward(*parts, cos.contiguous(), sin.contiguous(), out)
    return out


@rotary_backward.register_fake
def _like_all_heads(dq, dk, dv, cos=None, sin=None):
    batch, num_tokens, num_heads, width = dq.shape
    return dv.new_empty(batch, num_tokens, num_heads + 2 * dk.shape[2], width)
