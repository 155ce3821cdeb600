"""This package's kernels as terms, by the names under which torch's dispatcher knows them."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.cost.operations.elementwise import GATE_BESIDE_PRODUCT
from stepgauge.cost.operations.fused_loss import fused_forward
from stepgauge.cost.operations.tensor_overlap import beside_products
from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term
from stepgauge.measure.pointwise import passes
from stepgauge.measure.sent_operators import Axis
from stepgauge.spec.calibration import FULL_MASK

NAMESPACE = "stepgauge"
FREE = ("linear_cross_entropy_multiply_",)  # by one: a launch


def own_terms(
    func: Any,
    given: dict[str, Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    axes: Mapping[str, Axis],
) -> Iterator[Term]:
    """Those without a row in TERMS read their inputs once and write their outputs. `given`: its
    arguments by name; `axes`: of a layout, by the name of their group.
    """
    name = func.overloadpacket.__name__
    if name in FREE:
        return
    if name not in TERMS:
        yield from passes(func, inputs, outputs, sum(x.nbytes for x in (*inputs, *outputs)))
        return
    if "group" in given:
        given["group"] = axes[given["group"]]
    yield from TERMS[name](given)


def _attention(direction: str, given: Mapping[str, Any]) -> Iterator[Term]:
    """Calibrated with a causal mask, under which half of the pairs of query and key are seen: of a
    window, sequences that see as many.
    """
    q, k = given["q"], given["k"]
    pairs_twice = float(q.shape[-2] * k.shape[-2])
    if window := given.get("window"):
        seen = min(window, k.shape[-2])
        pairs_twice = 2.0 * q.shape[-2] * seen - seen**2
    sizes = math.prod(q.shape[:-2]), math.sqrt(pairs_twice), q.shape[-1]
    name = "triton" if given["is_causal"] else f"triton{FULL_MASK}"
    yield Term("attention", f"attention {name} {direction} {_kind(q.dtype)}", sizes)


def _forward(given: Mapping[str, Any]) -> Iterator[Term]:
    yield from _attention("forward", given)


def _backward(given: Mapping[str, Any]) -> Iterator[Term]:
    yield from _attention("backward", given)


def _column_forward(given: Mapping[str, Any]) -> Iterator[Term]:
    _, stream = given["weight"].shape
    tokens = math.prod(given["x"].shape[:2]) * given["group"].ranks
    yield from _beside("all_gather", "forward", given, tokens, stream)


def _column_backward(given: Mapping[str, Any]) -> Iterator[Term]:
    _, stream = given["weight"].shape
    tokens = math.prod(given["gradient"].shape[:2])
    yield from _beside("reduce_scatter", "backward", given, tokens, stream)


def _row_forward(given: Mapping[str, Any]) -> Iterator[Term]:
    stream, _ = given["weight"].shape
    tokens = math.prod(given["x"].shape[:2])
    yield from _beside("reduce_scatter", "forward", given, tokens, stream)


def _row_backward(given: Mapping[str, Any]) -> Iterator[Term]:
    stream, _ = given["weight"].shape
    tokens = math.prod(given["x"].shape[:2])
    yield from _beside("all_gather", "backward", given, tokens, stream)


def _beside(
    operation: str, phase: str, given: Mapping[str, Any], tokens: int, stream: int
) -> Iterator[Term]:
    """A layer's collective of tokens as wide as the residual stream with the products that hide it,
    and these. What arrives is summed by an operator of its own.
    """
    weight, axis = given["weight"], given["group"]
    n, k = weight.shape
    size = weight.itemsize
    how = Arithmetic(_kind(weight.dtype), size, size, size, False)
    sent = Term(operation, operation, (tokens * stream * size,), axis=axis.name)
    hidden, *_ = beside_products(sent, phase, (n, k), tokens, axis.ranks, how)
    yield hidden
    if phase == "forward":
        yield from how.linear_forward("linear", tokens, n, k, 0)
    else:
        for term in how.linear_backward("linear", tokens, n, k, 0):
            yield dataclasses.replace(term, gradient=0, weights=False)


def _loss(given: Mapping[str, Any]) -> Iterator[Term]:
    """Linear layer and cross-entropy in one."""
    hidden_ND, weight_VD = given["hidden_ND"], given["weight_VD"]
    computed = given["compute_dtype"]
    how = Arithmetic(
        _kind(computed), computed.itemsize, hidden_ND.itemsize, weight_VD.itemsize, False
    )
    v, d = weight_VD.shape
    yield from fused_forward(how, len(hidden_ND), v, d, hidden_ND.device.type)


def _gated_product(given: Mapping[str, Any]) -> Iterator[Term]:
    """SwiGLU's first product, whose gate is part of it (kernels/swiglu/feed_forward.py)."""
    x, weight = given["x"], given["weight"]
    sizes = len(x), *weight.shape
    yield Term("feed_forward.gate_up", f"matmul nt {_kind(x.dtype)}", sizes)


def _gated_product_backward(given: Mapping[str, Any]) -> Iterator[Term]:
    """The gradient of the last product's input, and what of the gate's pass stays beside it."""
    dout, down, gate_up = given["dout"], given["down_weight"], given["gate_up"]
    m, width = gate_up.shape
    yield Term("feed_forward.down", f"matmul nn {_kind(dout.dtype)}", (m, width // 2, len(down)))
    yield Term("feed_forward.gate", TRAFFIC, (GATE_BESIDE_PRODUCT * 2.5 * gate_up.nbytes,))


def _adamw(given: Mapping[str, Any]) -> Iterator[Term]:
    numel = sum(parameter.numel() for parameter in given["params"])
    if given["masters"]:  # as cost/operations/step_operations.py
        yield Term("optimizer", "optimizer fused master", (numel,), nbytes=28 * numel)
    else:
        kind = _kind(given["params"][0].dtype)
        yield Term("optimizer", f"optimizer fused {kind}", (numel,))


def _kind(dtype: torch.dtype) -> str:
    return "bf16" if dtype in (torch.bfloat16, torch.float16) else "fp32"


TERMS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Term]]] = {
    "flash_attention": _forward,
    "flash_attention_backward": _backward,
    "column_forward": _column_forward,
    "column_backward": _column_backward,
    "row_forward": _row_forward,
    "row_backward": _row_backward,
    "linear_cross_entropy": _loss,
    "adamw_": _adamw,
    "gated_product": _gated_product,
    "gated_product_backward": _gated_product_backward,
}
