"""RMSNorm, forward and backward.

``rms_norm`` is the function that models call; ``TritonRMSNorm`` replaces ``torch.nn.RMSNorm``;
``RMSNormTriton`` wraps the kernels as an autograd function. The equations are in reference.py,
their derivation and the design in docs/log/2026-11-21-rms_norm.md.

CUDA tensors with rows of up to 65,536 elements use the Triton kernels, with two exceptions: small
ones, whose time is all launch overhead, use torch's rms_norm; and under torch.compile rows of up to
8192 elements use the plain PyTorch oracle, which Inductor fuses with its neighbours. All other
tensors, and float64, use the oracle.

y is computed in float32 and has x's type. Under CUDA autocast it has the type of torch's own
rms_norm: float32 from torch 2.12 on, x's type before. The weight may be float32 or have x's type. A
second derivative raises with the kernels; the plain PyTorch version supports it.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from stepgauge.kernels.plain_eager import is_plain_eager

from . import reference
from .reference import backward_input, backward_weight

if importlib.util.find_spec("triton") is not None:
    from . import ops
else:  # use the reference
    ops = None

__all__ = [
    "MAX_WIDTH",
    "RMSNormTriton",
    "TritonRMSNorm",
    "backward_input",
    "backward_weight",
    "rms_norm",
]

MAX_WIDTH = 65536
# Inductor fuses the plain equation with the addition and the cast around it, which is impossible
# for an operator. For wider rows Inductor's backward takes 1.6 times as long as the kernel.
INDUCTOR_WIDTH = 8192
# Eager calls with an x of at most this many bytes use torch's rms_norm. At 2048 x 2560 in bf16 the
# host needs 125 us to launch its forward and backward and 205 us for the kernels here; on the GPU
# they take 39 and 30 us (one H200, 2026-11-21).
TORCH_BYTES = 2048 * 2560 * 2
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TYPES = (*_KERNEL_DTYPES, torch.float64)
# True if the installed torch's rms_norm returns float32 under CUDA autocast (pytorch issue 188955)
# instead of x's type. A constant, so that torch.compile need not trace the comparison.
BUILTIN_AUTOCAST_IS_FLOAT32 = TorchVersion(torch.__version__) >= (2, 12)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Returns ``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension (arXiv 1910.07467).

    Shapes: x and the result (*, D), weight (D). This file's docstring says which implementation
    runs and the type of the result. Raises ValueError for a weight whose shape does not match, and
    for types other than float32, bfloat16, float16 and float64.
    """
    is_compiling = torch.compiler.is_compiling()
    kernel_takes = _kernel_takes(x, weight)
    if kernel_takes and not is_compiling and _is_small(x, weight):
        return F.rms_norm(x, weight.shape, weight, eps)
    out_dtype = _output_dtype(x)
    if kernel_takes and is_plain_eager(x, weight):
        return RMSNormTriton.apply(x, weight, eps, out_dtype)  # checks shapes and types
    _check(x, weight)
    if not kernel_takes or (is_compiling and x.shape[-1] <= INDUCTOR_WIDTH):
        # Casting x to float32 is exact; only the rounding of y changes.
        return reference.forward(x.to(out_dtype), weight, eps)
    return torch.ops.stepgauge.rms_norm(x, weight, eps, out_dtype)[0]


class RMSNormTriton(torch.autograd.Function):
    """``.apply(x, weight, eps=1e-5, out_dtype=None)``: the kernels as an autograd function.

    Shapes: x (*, D), weight (D). Saves x, the weight and one float32 per row for backward.
    """

    @staticmethod
    def forward(ctx, x, weight, eps=1e-5, out_dtype=None):
        _require_kernels(x, weight)
        out_dtype = out_dtype or x.dtype
        run = ops.run_forward if is_plain_eager(x) else torch.ops.stepgauge.rms_norm
        y, rstd = run(x, weight, eps, out_dtype)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        # With create_graph, call the operator, which raises for a second derivative; a launch by
        # address would silently return a constant.
        by_address = is_plain_eager(dy) and not torch.is_grad_enabled()
        run = ops.run_backward if by_address else torch.ops.stepgauge.rms_norm_backward
        return (*run(dy, *ctx.saved_tensors), None, None)


class TritonRMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension, with the fused kernels and the same
    state_dict.
    """

    def __init__(self, width: int, *, eps: float = 1e-5, device=None, dtype=None):
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        super().__init__(width, eps=eps, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def _output_dtype(x: Tensor) -> torch.dtype:
    float32 = (
        x.is_cuda
        and x.dtype != torch.float64
        and torch.is_autocast_enabled("cuda")
        and BUILTIN_AUTOCAST_IS_FLOAT32
    )
    return torch.float32 if float32 else x.dtype


def _kernel_takes(x: Tensor, weight: Tensor) -> bool:
    return (
        x.is_cuda
        and ops is not None
        and x.dtype in _KERNEL_DTYPES
        and weight.dtype in _KERNEL_DTYPES
        and x.dim() > 0
        and x.shape[-1] <= MAX_WIDTH
    )


def _is_small(x: Tensor, weight: Tensor) -> bool:
    return (
        0 < x.nbytes <= TORCH_BYTES
        and x.dtype is weight.dtype  # otherwise torch runs several kernels
        and x.shape[-1:] == weight.shape
    )


def _require_kernels(x: Tensor, weight: Tensor):
    _check(x, weight)
    if ops is None:
        raise ValueError("RMSNormTriton needs the package triton, which is not installed")
    if x.dtype not in _KERNEL_DTYPES or weight.dtype not in _KERNEL_DTYPES:
        raise ValueError(
            f"RMSNormTriton takes float32, bfloat16 and float16, got {x.dtype} and {weight.dtype}"
        )
    if x.shape[-1] > MAX_WIDTH:
        raise ValueError(f"RMSNormTriton takes widths up to {MAX_WIDTH}, got {x.shape[-1]}")


def _check(x: Tensor, weight: Tensor):
    if x.dim() == 0 or weight.dim() != 1 or weight.shape[0] != x.shape[-1] or not weight.shape[0]:
        raise ValueError(
            "the weight must be (D,) with D the last dimension of x and at least 1, "
            f"got weight {tuple(weight.shape)} and x {tuple(x.shape)}"
        )
    for tensor in (x, weight):
        if tensor.dtype not in _TYPES:
            raise ValueError(
                f"RMSNorm takes float32, bfloat16, float16 and float64, got {tensor.dtype}"
            )
