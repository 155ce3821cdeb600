"""Elementwise work as the network does it: views, broadcasts and mixed types keep its kernels from
the rate of a plain pass over memory.

Legend: M tokens, N features: of queries and keys, or of the feed-forward layer.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepgauge.models.rotary import rotate

HEAD_WIDTH = 64
Parts = tuple[Tensor, ...]


class Pass(NamedTuple):
    """`inputs(m, n, new)` makes what `call` gets, whose first alone takes a gradient; `new` makes a
    tensor of a shape.
    """

    inputs: Callable[..., Parts]
    call: Callable[..., Parts]


def _heads_inputs(m: int, n: int, new: Callable[..., Tensor]) -> Parts:
    return new(1, m, 3 * n // 2), new(m, HEAD_WIDTH), new(m, HEAD_WIDTH)


def _heads(x_BTD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Parts:
    """Queries, keys and values from their one product; queries and keys rotated."""
    heads_BHTW = x_BTD.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
    third = heads_BHTW.shape[1] // 3
    qk_BHTW, v_BHTW = heads_BHTW.split((2 * third, third), dim=1)
    q_BHTW, k_BHTW = rotate(qk_BHTW, cos_TR, sin_TR).chunk(2, dim=1)
    return q_BHTW, k_BHTW, v_BHTW


def _gate_inputs(m: int, n: int, new: Callable[..., Tensor]) -> Parts:
    return (new(m, 2 * n),)


def _gate(x_TF: Tensor) -> Parts:
    gate_TF, up_TF = x_TF.chunk(2, dim=-1)
    return (F.silu(gate_TF) * up_TF,)


PASSES = {"heads": Pass(_heads_inputs, _heads), "gate": Pass(_gate_inputs, _gate)}


def operands(name: str, dtype: torch.dtype, m: int, n: int, device: torch.device) -> Parts:
    """What `run` gets: the inputs, what comes out, and its gradients."""
    new = functools.partial(torch.randn, device=device, dtype=dtype)
    first, *others = PASSES[name].inputs(m, n, new)
    first.requires_grad_()
    given = PASSES[name].call(first, *others)
    return (first, *others, *given, *(torch.randn_like(each) for each in given))


def run(name: str, is_backward: bool, *parts: Tensor) -> object:
    inputs = 3 if name == "heads" else 1
    count = (len(parts) - inputs) // 2
    given, gradients = parts[inputs : inputs + count], parts[inputs + count :]
    if is_backward:
        return torch.autograd.grad(given, parts[0], gradients, retain_graph=True)
    with torch.no_grad():
        return PASSES[name].call(*parts[:inputs])


def residual(x: Tensor, y: Tensor) -> Tensor:
    """The sum of the fp32 residual stream and a bf16 branch."""
    return x + y
