"""Terms of this package's kernels, by their operator names in torch's dispatcher."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.cost.operations.elementwise import GATE_BESIDE_PRODUCT
from stepgauge.cost.operations.fused_loss import FusedLoss
from stepgauge.cost.operations.tensor_overlap import OverlappedLayer
from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term
from stepgauge.measure.collective_operators import Axis
from stepgauge.measure.pointwise import passes
from stepgauge.spec.calibration import FULL_MASK

NAMESPACE = "stepgauge"
FREE = ("linear_cross_entropy_multiply_",)  # multiplies by one: only a launch
Arguments = Mapping[str, Any]  # arguments of an operator by name


def own_terms(
    func: Any,
    arguments: dict[str, Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    axes: Mapping[str, Axis],
) -> Iterator[Term]:
    """Yields the terms of one of this package's operators. An operator without an entry in TERMS
    reads its inputs once and writes its outputs.

    arguments  the operator's arguments by name
    axes       the layout's axes, by the name of their process group
    """
    name = func.overloadpacket.__name__
    if name in FREE:
        return
    if name not in TERMS:
        yield from passes(func, inputs, outputs, sum(x.nbytes for x in (*inputs, *outputs)))
        return
    if "group" in arguments:
        arguments["group"] = axes[arguments["group"]]
    yield from TERMS[name](arguments)


def _attention(direction: str, arguments: Arguments) -> Iterator[Term]:
    """Yields attention at a sequence length with the same number of visible pairs. It is calibrated
    with a causal mask, where half of all pairs of query and key are visible.
    """
    q, k = arguments["q"], arguments["k"]
    twice_the_pairs = float(q.shape[-2] * k.shape[-2])
    if window := arguments.get("window"):
        visible = min(window, k.shape[-2])
        twice_the_pairs = 2.0 * q.shape[-2] * visible - visible**2
    sizes = math.prod(q.shape[:-2]), math.sqrt(twice_the_pairs), q.shape[-1]
    name = "triton" if arguments["is_causal"] else f"triton{FULL_MASK}"
    yield Term("attention", f"attention {name} {direction} {_kind(q.dtype)}", sizes)


def _column_forward(arguments: Arguments) -> Iterator[Term]:
    _, stream = arguments["weight"].shape
    tokens = math.prod(arguments["x"].shape[:-1]) * arguments["group"].ranks
    yield from _overlapped_layer("all_gather", "forward", arguments, tokens, stream)


def _column_backward(arguments: Arguments) -> Iterator[Term]:
    _, stream = arguments["weight"].shape
    tokens = math.prod(arguments["gradient"].shape[:-1])
    yield from _overlapped_layer("reduce_scatter", "backward", arguments, tokens, stream)


def _row_forward(arguments: Arguments) -> Iterator[Term]:
    stream, _ = arguments["weight"].shape
    tokens = math.prod(arguments["x"].shape[:-1])
    yield from _overlapped_layer("reduce_scatter", "forward", arguments, tokens, stream)


def _row_backward(arguments: Arguments) -> Iterator[Term]:
    stream, _ = arguments["weight"].shape
    tokens = math.prod(arguments["x"].shape[:-1])
    yield from _overlapped_layer("all_gather", "backward", arguments, tokens, stream)


def _overlapped_layer(
    operation: str, phase: str, arguments: Arguments, tokens: int, stream: int
) -> Iterator[Term]:
    """Yields a linear layer's products, preceded by the collectives that they hide.

    stream  width of the residual stream, which the collective sends for each token
    """
    weight, axis = arguments["weight"], arguments["group"]
    n, k = weight.shape
    size = weight.itemsize
    how = Arithmetic(_kind(weight.dtype), size, size, size, False)
    sent = Term(operation, operation, (tokens * stream * size,), axis=axis.name)
    yield from OverlappedLayer((n, k), tokens, axis.ranks, how.dtype).terms(sent, phase)
    if phase == "forward":
        yield from how.linear_forward("linear", tokens, n, k, 0)
    else:
        for term in how.linear_backward("linear", tokens, n, k, 0):
            yield dataclasses.replace(term, gradient=0, for_weights=False)


def _loss(arguments: Arguments) -> Iterator[Term]:
    """Yields the fused linear layer and cross-entropy."""
    hidden_ND, weight_VD = arguments["hidden_ND"], arguments["weight_VD"]
    dtype = arguments["compute_dtype"]
    how = Arithmetic(_kind(dtype), dtype.itemsize, hidden_ND.itemsize, weight_VD.itemsize, False)
    v, d = weight_VD.shape
    yield from FusedLoss(how, len(hidden_ND), v, d, hidden_ND.device.type == "cpu").forward()


def _gated_product(arguments: Arguments) -> Iterator[Term]:
    """Yields SwiGLU's first product, which includes the gate (kernels/swiglu/feed_forward.py)."""
    x, weight = arguments["x"], arguments["weight"]
    sizes = len(x), *weight.shape
    yield Term("feed_forward.gate_up", f"matmul nt {_kind(x.dtype)}", sizes)


def _gated_product_backward(arguments: Arguments) -> Iterator[Term]:
    """Yields the gradient of the last product's input, and the part of the gate's pass that it does
    not hide.
    """
    dout, down, gate_up = arguments["dout"], arguments["down_weight"], arguments["gate_up"]
    m, width = gate_up.shape
    yield Term("feed_forward.down", f"matmul nn {_kind(dout.dtype)}", (m, width // 2, len(down)))
    yield Term("feed_forward.gate", TRAFFIC, (GATE_BESIDE_PRODUCT * 2.5 * gate_up.nbytes,))


def _adamw(arguments: Arguments) -> Iterator[Term]:
    numel = sum(parameter.numel() for parameter in arguments["params"])
    if arguments["masters"]:  # same bytes as in cost/operations/step_operations.py
        yield Term("optimizer", "optimizer fused master", (numel,), nbytes=28 * numel)
    else:
        kind = _kind(arguments["params"][0].dtype)
        yield Term("optimizer", f"optimizer fused {kind}", (numel,))


def _kind(dtype: torch.dtype) -> str:
    return "bf16" if dtype in (torch.bfloat16, torch.float16) else "fp32"


TERMS: Mapping[str, Callable[[Arguments], Iterator[Term]]] = {
    "flash_attention": functools.partial(_attention, "forward"),
    "flash_attention_backward": functools.partial(_attention, "backward"),
    "column_forward": _column_forward,
    "column_backward": _column_backward,
    "row_forward": _row_forward,
    "row_backward": _row_backward,
    "linear_cross_entropy": _loss,
    "adamw_": _adamw,
    "gated_product": _gated_product,
    "gated_product_backward": _gated_product_backward,
}
