"""SwiGLU's gate, y = silu(gate) · up, whose backward is a single kernel.

A model calls ``swiglu`` on the output of one matrix product that computes gate and up. The equations
are in reference.py. The forward is two plain operations, which torch.compile fuses into one kernel.
For backward, Inductor concatenates the two gradients with a kernel that reads its inputs twice: at
16,384 x 6400 in bf16 it took 498 us, while one pass over the bytes takes 250 us (one H200,
docs/log/2026-11-23-hopper-steps.md). The Triton kernel here needs only one pass.

CUDA tensors in float32, bfloat16 and float16 use the Triton kernel. Other tensors, and all tensors if
Triton is not installed, use plain PyTorch.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference

if importlib.util.find_spec("triton") is not None:
    from . import triton as kernels
else:  # use the reference
    kernels = None

__all__ = ["swiglu"]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns ``silu(gate) * up`` (*, F) for gate_up (*, 2F), in its type.

    Raises ValueError for an odd last dimension and for types that are not floating-point. A second
    derivative raises with the kernel; the plain PyTorch version supports it.
    """
    if not gate_up.dim() or gate_up.shape[-1] % 2 or not gate_up.dtype.is_floating_point:
        raise ValueError(
            "swiglu takes floating-point tensors whose last dimension is gate followed by up, "
            f"got {gate_up.dtype} of shape {tuple(gate_up.shape)}"
        )
    return _SwiGLU.apply(gate_up) if _has_kernel(gate_up) else _plain(gate_up)


def _has_kernel(gate_up: Tensor) -> bool:
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
    """Returns the gradient of gate_up (*, 2F) from the gradient dy (*, F)."""
    if kernels is None or not (gate_up.is_cuda or kernels.IS_INTERPRETED):
        return reference.backward(dy, gate_up)
    out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    kernels.backward(dy.contiguous(), gate_up.contiguous(), out)
    return out


@swiglu_backward.register_fake
def _(dy, gate_up):
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)
