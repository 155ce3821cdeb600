"""The whole feed-forward layer with SwiGLU, whose gate costs no pass over memory of its own.

Forward keeps the input and the first product; y, which goes into the second, is a by-product of
backward's, so that it is not kept. quack.py computes on GPUs, plain PyTorch elsewhere.

Legend: M tokens, D model width, F feed-forward width. Of gate_up the columns of gate and up stand in
turns, as QuACK has them: gate 0, up 0, gate 1; in the weight gate's rows stand before up's.
"""

import torch
from torch import Tensor

from . import quack, reference


def swiglu_feed_forward(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """Return ``(silu(x @ gate.T) * (x @ up.T)) @ down_weight.T``, of the shape of x (*, D).

    gate_up_weight (2F, D) has gate's rows, then up's; down_weight is (D, F). Under autocast all are
    narrowed to its type first. On GPUs it takes bfloat16 and float16, and needs quack-kernels and a
    Hopper GPU (ValueError). There is no second derivative: asking for one raises.
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
        dx = (d_gate_up @ in_turns(gate_up_weight)).unflatten(0, dout.shape[:-1])
        return dx, one_after_other(d_gate_up.T @ x_MD), d_down


def in_turns(rows: Tensor) -> Tensor:
    """A copy with a row of the first half, one of the second, and so on."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def one_after_other(rows: Tensor) -> Tensor:
    """A copy with all that in_turns put in even places, then the rest."""
    return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


@torch.library.custom_op("stepgauge::gated_product", mutates_args=())
def gated_product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up (M, 2F) in turns and y (M, F), of x (M, D) and weight (2F, D)."""
    if x.is_cuda:
        return quack.product(x, weight)
    gate_up = x @ weight.T
    return in_turns(gate_up.T).T.contiguous(), reference.forward(gate_up)


@torch.library.custom_op("stepgauge::gated_product_backward", mutates_args=())
def gated_product_backward(
    dout: Tensor, down_weight: Tensor, gate_up: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up, in turns like it, and y, of the gradient (M, D) of the layer."""
    if dout.is_cuda:
        return quack.product_backward(dout, down_weight, gate_up)
    apart = one_after_other(gate_up.T).T
    d_gate_up = reference.backward(dout @ down_weight, apart)
    return in_turns(d_gate_up.T).T.contiguous(), reference.forward(apart)


@gated_product.register_fake
def _(x, weight):
    rows, width = x.shape[0], weight.shape[0]
    return x.new_empty(rows, width), x.new_empty(rows, width // 2)


@gated_product_backward.register_fake
def _(dout, down_weight, gate_up):
    rows, width = gate_up.shape
    return gate_up.new_empty(rows, width), gate_up.new_empty(rows, width // 2)
