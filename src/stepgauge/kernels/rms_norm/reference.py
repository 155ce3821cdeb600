"""RMSNorm (Zhang and Sennrich 2019) and its two gradients in plain PyTorch: the oracle.

Shape suffixes: D the row's width, * any leading shape. For each row, with
r = 1 / sqrt(mean(x^2) + eps):

    y_D  = w_D x_D r
    dw_D = sum over rows of  dy_D x_D r
    dx_D = r (w_D dy_D - x_D r^2 mean(w_D dy_D x_D))

docs/log/2026-11-21-rms_norm.md derives the two gradients. Narrower types than float32 are computed
in float32; float64 stays float64.
"""

import torch
from torch import Tensor


def forward(x: Tensor, weight_D: Tensor, eps: float = 1e-5) -> Tensor:
    """Returns ``w x / sqrt(mean(x^2) + eps)`` over the last dimension, in x's type.

    Shapes: x (*, D), weight (D); the result is (*, D). Differentiable by autograd.
    """
    wide = _wide(x)
    y = wide * _rstd(wide, eps) * weight_D.to(wide.dtype)
    return y.to(x.dtype)


def backward_input(grad_output: Tensor, x: Tensor, weight_D: Tensor, eps: float = 1e-5) -> Tensor:
    """Returns the gradient with respect to x, (*, D), in x's type."""
    wide = _wide(x)
    rstd = _rstd(wide, eps)
    weighted = grad_output.to(wide.dtype) * weight_D.to(wide.dtype)
    mean = (weighted * wide).mean(dim=-1, keepdim=True)
    return (rstd * (weighted - wide * rstd.square() * mean)).to(x.dtype)


def backward_weight(grad_output: Tensor, x: Tensor, weight_D: Tensor, eps: float = 1e-5) -> Tensor:
    """Returns the gradient with respect to the weight, (D), in the weight's type."""
    wide = _wide(x)
    product = grad_output.to(wide.dtype) * wide * _rstd(wide, eps)
    return product.reshape(-1, x.shape[-1]).sum(dim=0).to(weight_D.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rstd(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
