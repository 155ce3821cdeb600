"""SwiGLU's gate (Shazeer 2020, arXiv 2002.05202) in plain PyTorch: the oracle.

For gate g and up u, with s = sigmoid(g) and the gradient dy of y:

    y  = g s u
    dg = dy u s (1 + g (1 - s))
    du = dy g s

Everything is computed in at least float32; each result is rounded once, to the type of gate_up.
"""

import torch
from torch import Tensor


def forward(gate_up: Tensor) -> Tensor:
    """Returns y (*, F) for gate_up (*, 2F): gate, then up."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Returns the gradient of gate_up (*, 2F) from the gradient dy (*, F)."""
    dy_wide = _wide(dy)
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    dgate = dy_wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([dgate, dy_wide * gate * sigmoid], dim=-1).to(gate_up.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
