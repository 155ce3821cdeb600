"""RMSNorm, forward and backward, with an optional fused residual addition.

``rms_norm`` is what a model calls; ``TritonRMSNorm`` drops in for ``torch.nn.RMSNorm``;
``RMSNormTriton`` and ``RMSNormReference`` are the two as autograd functions. The equations stand
in reference.py, their derivation and the design in docs/log/2026-11-21-rms_norm.md.

CUDA tensors up to 65,536 wide go to Triton, but small ones, whose launches are all that counts, to
torch's own; others, and float64, to the plain PyTorch oracle, and under torch.compile those up to
8192 wide too: Inductor makes one kernel of it and its neighbours.
y has x's type (with a residual the sum's), computed in float32; under CUDA autocast it has the type
that the installed torch's own rms_norm gives: float32 from torch 2.12 on, x's before. The weight
may be float32 or x's type. The kernels have no second derivative and raise; the plain PyTorch
version has.
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
else:  # The reference computes.
    ops = None

__all__ = [
    "MAX_WIDTH",
    "RMSNormReference",
    "RMSNormTriton",
    "TritonRMSNorm",
    "backward_input",
    "backward_weight",
    "rms_norm",
]

MAX_WIDTH = 65536
# Inductor fuses the equation with the residual addition and the cast around it, which an operator
# cannot be. Wider than this its backward takes 1.6 times the kernel's time.
INDUCTOR_WIDTH = 8192
# An eager x of so many bytes goes to torch's rms_norm. At 2048 x 2560 in bf16 the host launches its
# forward and backward in 125 us, ours in 205; the GPU takes 39 and 30 (one H200, 2026-11-21).
TORCH_BYTES = 2048 * 2560 * 2
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TYPES = (*_KERNEL_DTYPES, torch.float64)
# Whether the installed torch's rms_norm is float32 under CUDA autocast (pytorch issue 188955) or
# keeps x's type. A constant, so that torch.compile need not trace the question.
BUILTIN_AUTOCAST_IS_FLOAT32 = TorchVersion(torch.__version__) >= (2, 12)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-5, *, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``weight * h / sqrt(mean(h^2) + eps)`` over the last dimension (arXiv 1910.07467).

    Without ``residual`` h is x and the result is y. With it h is ``x + residual``, and the result
    is ``(y, h)``: what a pre-norm block needs, in one pass. Shapes: x, residual and y (*, D),
    weight (D). y has x's type; who computes it and in which type: this file's docstring. Raises
    ValueError for a weight or residual whose shape does not fit and for types other than float32,
    bfloat16, float16 and float64.
    """
    is_compiling = torch.compiler.is_compiling()
    _check(x, weight)
    if residual is not None:
        x, residual = _checked_with_residual(x, residual)
    out_dtype = _output_dtype(x)
    is_plain = not _kernel_takes(x, weight) or (is_compiling and x.shape[-1] <= INDUCTOR_WIDTH)
    if is_plain or (not is_compiling and _is_small(x, weight)):
        h = x if residual is None else x + residual
        # The narrow type's float32 image holds the same values: only the rounding of y changes.
        y = (
            reference.forward(h.to(out_dtype), weight, eps)
            if is_plain
            else F.rms_norm(h, weight.shape, weight, eps)
        )
        return y if residual is None else (y, h)
    if is_plain_eager(x, weight, *([] if residual is None else [residual])):
        if residual is None:
            return RMSNormTriton.apply(x, weight, eps, out_dtype)
        return _RMSNormResidual.apply(x, residual, weight, eps, out_dtype)
    y, total, _ = torch.ops.stepgauge.rms_norm(x, residual, weight, eps, out_dtype)
    return y if residual is None else (y, total)


class RMSNormTriton(torch.autograd.Function):
    """``.apply(x, weight, eps=1e-5, out_dtype=None)``: the kernels as an autograd function.

    Saves x, the weight and one float32 a row. x (*, D), weight (D).
    """

    @staticmethod
    def forward(ctx, x, weight, eps=1e-5, out_dtype=None):
        _require_kernels(x, weight)
        out_dtype = out_dtype or x.dtype
        run = ops.run_forward if is_plain_eager(x) else torch.ops.stepgauge.rms_norm
        y, _, rstd = run(x, None, weight, eps, out_dtype)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        h, weight, rstd = ctx.saved_tensors
        dx, dw = _run_backward(dy, h, weight, rstd, None)
        return dx, dw, None, None


class _RMSNormResidual(torch.autograd.Function):
    """``.apply(x, residual, weight, eps, out_dtype)`` gives (y, x + residual). Eager only."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, out_dtype):
        y, total, rstd = ops.run_forward(x, residual, weight, eps, out_dtype)
        ctx.save_for_backward(total, weight, rstd)
        return y, total

    @staticmethod
    def backward(ctx, dy, dsum):
        total, weight, rstd = ctx.saved_tensors
        dx, dw = _run_backward(dy, total, weight, rstd, dsum)
        return dx, dx, dw, None, None


class RMSNormReference(torch.autograd.Function):
    """``.apply(x, weight, eps=1e-5)``: the oracle with its two gradients written out."""

    @staticmethod
    def forward(ctx, x, weight, eps=1e-5):
        _check(x, weight)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return reference.forward(x, weight, eps)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = backward_input(dy, x, weight, ctx.eps)
        return dx, backward_weight(dy, x, weight, ctx.eps), None


class TritonRMSNorm(nn.Module):
    """``torch.nn.RMSNorm`` on the fused kernel; the same state_dict (``weight``).

    ``forward(x)`` gives y; ``forward(x, residual)`` gives ``(y, x + residual)``.
    """

    def __init__(self, width: int, *, eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, residual: Tensor | None = None):
        return rms_norm(x, self.weight, self.eps, residual=residual)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


def _output_dtype(x: Tensor) -> torch.dtype:
    float32 = (
        x.is_cuda
        and x.dtype != torch.float64
        and torch.is_autocast_enabled("cuda")
        and BUILTIN_AUTOCAST_IS_FLOAT32
    )
    return torch.float32 if float32 else x.dtype


def _run_backward(dy, h, weight, rstd, dsum):
    # With create_graph the operator is called: it has no second derivative and says so, where
    # a launch by address would silently give a constant.
    if is_plain_eager(dy) and not torch.is_grad_enabled():
        return ops.run_backward(dy, h, weight, rstd, dsum)
    return torch.ops.stepgauge.rms_norm_backward(dy, h, weight, rstd, dsum)


def _kernel_takes(x: Tensor, weight: Tensor) -> bool:
    return (
        x.is_cuda
        and ops is not None
        and x.dtype in _KERNEL_DTYPES
        and weight.dtype in _KERNEL_DTYPES
        and x.shape[-1] <= MAX_WIDTH
    )


def _is_small(x: Tensor, weight: Tensor) -> bool:
    # Of two types torch makes several kernels.
    return x.dtype == weight.dtype and x.numel() * x.element_size() <= TORCH_BYTES


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
    _check_types(x, weight)


def _check_types(*tensors: Tensor):
    for tensor in tensors:
        if tensor.dtype not in _TYPES:
            raise ValueError(
                f"RMSNorm takes float32, bfloat16, float16 and float64, got {tensor.dtype}"
            )


def _checked_with_residual(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the type that their sum has."""
    if residual.shape != x.shape:
        raise ValueError(
            f"the residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    _check_types(residual)
    if residual.dtype == x.dtype:
        return x, residual
    common = torch.promote_types(x.dtype, residual.dtype)
    return x.to(common), residual.to(common)
