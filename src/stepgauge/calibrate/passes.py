"""The elementwise work of the network, eager and compiled.

Views, broadcasts and mixed dtypes make it slower than a plain pass over memory.

Legend: B batch, T sequence, M = BT tokens, N width (of queries and keys, of the feed-forward layer or of
the residual stream), W head width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepgauge.bench.kernels.operation import compiled as code_of
from stepgauge.kernels.rotary import rotate, rotated_heads
from stepgauge.kernels.swiglu import swiglu

HEAD_WIDTH = 64
BATCH = 4  # views of a single sequence have fewer dimensions, and their kernels are faster
Parts = tuple[Tensor, ...]


class Pass(NamedTuple):
    """One kind of elementwise work.

    inputs      inputs(m, n, new) returns the inputs of `call`; new(*shape) makes a tensor
    num_leaves  how many of the inputs get gradients
    compiled    what a compiled block runs instead of `call`, if that differs
    """

    inputs: Callable[..., Parts]
    call: Callable[..., Parts]
    num_inputs: int
    num_leaves: int = 1
    compiled: Callable[..., Parts] | None = None


def _heads_inputs(m: int, n: int, new: Callable[..., Tensor]) -> Parts:
    length = m // BATCH
    return new(BATCH, length, 3 * n // 2), new(length, HEAD_WIDTH), new(length, HEAD_WIDTH)


def _heads(x_BTN: Tensor, cos_TW: Tensor, sin_TW: Tensor) -> Parts:
    """Splits one product into queries, keys and values, and rotates queries and keys."""
    qk_BTHW, v_BTHW = _queries_and_values(x_BTN)
    q_BTHW, k_BTHW = rotate(qk_BTHW, cos_TW[:, None], sin_TW[:, None]).chunk(2, dim=2)
    return tuple(x.transpose(1, 2) for x in (q_BTHW, k_BTHW, v_BTHW))


def _queries_and_values(x_BTN: Tensor) -> Parts:
    """Returns queries with keys, and values."""
    heads_BTHW = x_BTN.unflatten(-1, (-1, HEAD_WIDTH))
    third = heads_BTHW.shape[2] // 3
    return heads_BTHW.split((2 * third, third), dim=2)


def _split(x_BTN: Tensor, cos_TW: Tensor, sin_TW: Tensor) -> Parts:
    """Splits without rotation: the parts are views, and backward joins their gradients."""
    qk_BTHW, v_BTHW = _queries_and_values(x_BTN)
    return tuple(x.transpose(1, 2) for x in (*qk_BTHW.chunk(2, dim=2), v_BTHW))


def _compiled_heads(x_BTN: Tensor, cos_TW: Tensor, sin_TW: Tensor) -> Parts:
    """As in models/transformer.py when compiled."""
    heads_BTHW = x_BTN.unflatten(-1, (-1, HEAD_WIDTH))
    return rotated_heads(heads_BTHW, [heads_BTHW.shape[2] // 3] * 3, cos_TW, sin_TW)


def _gate_inputs(m: int, n: int, new: Callable[..., Tensor]) -> Parts:
    return (new(m, 2 * n),)


def _gate(x_MN: Tensor) -> Parts:
    gate_MN, up_MN = x_MN.chunk(2, dim=-1)
    return (F.silu(gate_MN) * up_MN,)


def _compiled_gate(x_MN: Tensor) -> Parts:
    """As in models/feed_forward.py when compiled: one kernel computes both gradients."""
    return (swiglu(x_MN),)


def _gelu_inputs(m: int, n: int, new: Callable[..., Tensor]) -> Parts:
    return (new(m, n),)


def _gelu(x_MN: Tensor) -> Parts:
    return (F.gelu(x_MN),)


def _norm_inputs(m: int, n: int, new: Callable[..., Tensor]) -> Parts:
    return new(m, n, dtype=torch.float32), new(m, n), new(n, dtype=torch.float32)


def _norm(x_MN: Tensor, branch_MN: Tensor, weight_N: Tensor) -> Parts:
    """Returns the residual sum, and its norm in the dtype of products."""
    sum_MN = x_MN + branch_MN
    return sum_MN, F.rms_norm(sum_MN, weight_N.shape, weight_N, eps=1e-5).to(branch_MN.dtype)


PASSES = {
    "heads": Pass(_heads_inputs, _heads, 3, compiled=_compiled_heads),
    "split": Pass(_heads_inputs, _split, 3),
    "gate": Pass(_gate_inputs, _gate, 1, compiled=_compiled_gate),
    "gelu": Pass(_gelu_inputs, _gelu, 1),
    "norm": Pass(_norm_inputs, _norm, 3, num_leaves=3),
}


def operands(
    name: str, dtype: torch.dtype, m: int, n: int, device: torch.device, *, compiled: bool = False
) -> Parts:
    """Returns the operands of `run`: inputs, outputs, and gradients of the outputs."""
    work = PASSES[name]
    inputs = work.inputs(m, n, functools.partial(_new, dtype, device))
    for leaf in inputs[: work.num_leaves]:
        leaf.requires_grad_()
    outputs = _call(name, compiled=compiled)(*inputs)
    return (*inputs, *outputs, *(torch.randn_like(each) for each in outputs))


def _new(
    default: torch.dtype, device: torch.device, *shape: int, dtype: torch.dtype | None = None
) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype or default)


@functools.cache
def _call(name: str, *, compiled: bool) -> Callable[..., Any]:
    if not compiled:
        return PASSES[name].call
    return code_of(PASSES[name].compiled or PASSES[name].call)


def run(name: str, is_backward: bool, *parts: Tensor, compiled: bool = False) -> object:
    """Runs forward or backward on the parts from `operands`."""
    work = PASSES[name]
    count = (len(parts) - work.num_inputs) // 2
    inputs, outputs = parts[: work.num_inputs], parts[work.num_inputs :][:count]
    if is_backward:
        gradients = parts[work.num_inputs + count :]
        return torch.autograd.grad(outputs, inputs[: work.num_leaves], gradients, retain_graph=True)
    # A compiled forward keeps what backward needs, as in a step; without gradients, its code differs.
    with torch.set_grad_enabled(compiled):
        return _call(name, compiled=compiled)(*inputs)


def residual(x: Tensor, y: Tensor) -> Tensor:
    """Returns the sum of the fp32 residual stream and a bf16 branch."""
    return x + y
