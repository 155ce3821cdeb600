"""SwiGLU's gate, y = silu(gate) · up, with a backward of one kernel.

``swiglu`` is what a model calls, on the output of one matrix product that gives gate and up. The
equations stand in reference.py. Its forward is two plain operations, which torch.compile makes one
kernel of. Of the two gradients, behind each other as the matrix product wants them, Inductor makes
a concatenation that reads its inputs twice: at 16,384 x 6400 in bf16 it took 498 us, where the
bytes of one pass take 250 (one H200, docs/log/2026-11-23-hopper-steps.md).

CUDA tensors in float32, bfloat16 and float16 go to Triton; others, and those that a process without
Triton has, to plain PyTorch.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference

if importlib.util.find_spec("triton") is not None:
    from . import triton as kernels
else:  # The reference computes.
    kernels = None

__all__ = ["swiglu"]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` (*, F) of gate_up (*, 2F), in its type.

    Raises ValueError for a last dimension that is odd, and for types that are not floating. The
    kernel has no second derivative and raises; the plain PyTorch version has.
    """
    if not gate_up.dim() or gate_up.shape[-1] % 2 or not gate_up.dtype.is_floating_point:
        raise ValueError(
            "swiglu takes floating tensors whose last dimension is gate and up behind each other, "
            f"got {gate_up.dtype} of shape {tuple(gate_up.shape)}"
        )
    return _SwiGLU.apply(gate_up) if _takes(gate_up) else _plain(gate_up)


def _takes(gate_up: Tensor) -> bool:
    return gate_up.is_cuda and kernels is not None and gate_up.dtype in _KERNEL_DTYPES


def _plain(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return _plain(gate_up)

    @staticmethod
    def backward(ctx, dy):
        return torch.ops.stepgauge.swiglu_backward(dy, *ctx.saved_tensors)


@torch.library.custom_op("stepgauge::swiglu_backward", mutates_args=())
def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate_up (*, 2F), of dy (*, F)."""
    if kernels is None or not (gate_up.is_cuda or kernels.IS_INTERPRETED):
        return reference.backward(dy, gate_up)
    out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    kernels.backward(dy.contiguous(), gate_up.contiguous(), out)
    return out


@swiglu_backward.register_fake
def _(dy, gate_up):
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)
