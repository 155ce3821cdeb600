"""The whole feed-forward layer with SwiGLU, in which the gate needs no separate pass over memory.

Forward saves the input and the first product. It does not save y, the input of the second product,
because a kernel of backward computes it again as a by-product. GPUs use quack.py, other devices
plain PyTorch.

Legend: M tokens, D model width, F feed-forward width. The columns of gate_up are interleaved as in
QuACK: gate 0, up 0, gate 1, ... In the weight, gate's rows come before up's.
"""

import torch
from torch import Tensor

from . import quack, reference


def swiglu_feed_forward(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """Returns ``(silu(x @ gate.T) * (x @ up.T)) @ down_weight.T``, with the shape of x (*, D).

    gate_up_weight (2F, D) has gate's rows, then up's; down_weight is (D, F). Under autocast all are
    cast to its type first. On GPUs the types are bfloat16 and float16, and ValueError is raised
    without a Hopper GPU and a quack-kernels that can compile. A second derivative raises.
    """
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        narrow = torch.get_autocast_dtype(x.device.type)
        x, gate_up_weight, down_weight = (t.to(narrow) for t in (x, gate_up_weight, down_weight))
    return _FeedForward.apply(x, gate_up_weight, down_weight)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up_weight, down_weight):
        x_MD = x.flatten(0, -2)
        gate_up, y = torch.ops.stepgauge.gated_product(x_MD, gate_up_weight)
        ctx.save_for_backward(x_MD, gate_up_weight, down_weight, gate_up)
        return (y @ down_weight.T).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dout):
        x_MD, gate_up_weight, down_weight, gate_up = ctx.saved_tensors
        dout_MD = dout.flatten(0, -2).contiguous()
        d_gate_up, y = torch.ops.stepgauge.gated_product_backward(dout_MD, down_weight, gate_up)
        d_down = dout_MD.T @ y
        dx = (d_gate_up @ interleaved(gate_up_weight)).unflatten(0, dout.shape[:-1])
        return dx, deinterleaved(d_gate_up.T @ x_MD), d_down


def interleaved(rows: Tensor) -> Tensor:
    """Returns a copy whose rows alternate between the first and the second half."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def deinterleaved(rows: Tensor) -> Tensor:
    """Returns a copy with the even rows, then the odd rows: the inverse of interleaved."""
    return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


@torch.library.custom_op("stepgauge::gated_product", mutates_args=())
def gated_product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gate_up (M, 2F), interleaved, and y (M, F) for x (M, D) and weight (2F, D)."""
    if x.is_cuda:
        return quack.product(x, weight)
    gate_up = x @ weight.T
    return interleaved(gate_up.T).T.contiguous(), reference.forward(gate_up)


@torch.library.custom_op("stepgauge::gated_product_backward", mutates_args=())
def gated_product_backward(
    dout: Tensor, down_weight: Tensor, gate_up: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of gate_up, interleaved like it, and y, from the gradient (M, D) of the
    layer's output.
    """
    if dout.is_cuda:
        return quack.product_backward(dout, down_weight, gate_up)
    halves = deinterleaved(gate_up.T).T
    d_gate_up = reference.backward(dout @ down_weight, halves)
    return interleaved(d_gate_up.T).T.contiguous(), reference.forward(halves)


@gated_product.register_fake
def _(x, weight):
    rows, width = x.shape[0], weight.shape[0]
    return x.new_empty(rows, width), x.new_empty(rows, width // 2)


@gated_product_backward.register_fake
def _(dout, down_weight, gate_up):
    rows, width = gate_up.shape
    return gate_up.new_empty(rows, width), gate_up.new_empty(rows, width // 2)
