"""Rotary positions (Su et al., arXiv 2104.09864) in plain PyTorch, and the oracle of their gradient.

For features x and tables c and s with R columns, in which the first half of the sines is negated,

    y_i = c_i x_i + s_i x_j    with j = (i + R/2) mod R, for i < R;    y_i = x_i from R on

and for the gradient dy of y

    dx_i = c_i dy_i + s_j dy_j.

Legend: B batch, T sequence; H heads of queries, K heads of keys and of values, S all of these heads;
W width of a head, R features of it that are rotated.
"""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + R/2) of the first R features of x (..., W) by tables (..., R).

    Takes three kernels: a roll swaps the halves, and the table contains the sign.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(width // 2, -1), sin)


def rotated_backward(dy_BTHW: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Returns dx_BTHW, computed in at least float32."""
    width = cos_TR.shape[-1]
    wide = dy_BTHW.to(torch.promote_types(dy_BTHW.dtype, torch.float32))
    turned, rest = wide[..., :width], wide[..., width:]
    dx = turned * cos_TR[:, None] + (turned * sin_TR[:, None]).roll(-(width // 2), -1)
    return torch.cat([dx, rest], dim=-1)


def backward(
    dq_BTHW: Tensor, dk_BTKW: Tensor, dv_BTKW: Tensor, cos_TR: Tensor, sin_TR: Tensor
) -> Tensor:
    """Returns the gradient of heads_BTSW, in dv's type."""
    rotated = [rotated_backward(each, cos_TR, sin_TR) for each in (dq_BTHW, dk_BTKW)]
    return torch.cat([each.to(dv_BTKW.dtype) for each in (*rotated, dv_BTKW)], dim=2)
