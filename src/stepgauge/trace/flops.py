"""FLOPs and least bytes of an operation, computed from its shapes.

Matrix products: 2 per multiply-add. Attention over B, H, T, S, D: 4BHTSD forward, 10BHTSD backward
(which recomputes the scores), half of that if it is causal. Softmax: 5 per element (maximum,
difference, exponential, sum, quotient), its backward 4. All others have only bytes. Bytes count each
argument read once and the result written once, without repeated reads from the cache.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from stepgauge.trace.events import Shapes

_BYTES = {
    "double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4, "short int": 2,
    "signed char": 1, "unsigned char": 1, "bool": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip


class Cost(NamedTuple):
    """`flops` is None if there is no formula, `bytes` is None if the shapes do not determine them."""

    flops: float | None
    bytes: float | None


def cost(operation: str, shapes: Shapes | None) -> Cost:
    if shapes is None:
        return Cost(None, None)
    formula = _FORMULAS.get(operation)
    try:
        flops, result = formula(shapes) if formula else (None, _largest(shapes))
    except (LookupError, ValueError):  # the formula does not cover these arguments
        flops, result = None, _largest(shapes)
    width = _BYTES.get(dtype(shapes), 0)
    if operation in _INDEXING:
        # Only the touched elements count: writing one row does not read the whole tensor.
        try:
            touched = _INDEXING[operation](shapes)
        except LookupError:
            touched = 0
        return Cost(flops, 2.0 * touched * width if touched else None)
    if not (formula or operation.startswith(("aten::", "triton_", "stepgauge::"))):
        return Cost(flops, None)  # a user's operation: unknown how much of its arguments it reads
    read = sum(
        math.prod(d) * _BYTES.get(t, 0)
        for d, t in zip(shapes.dims, shapes.types, strict=False)
        if d
    )
    # The arguments of a Triton kernel include its result.
    written = 0 if operation.startswith("triton_") else result * width
    return Cost(flops, read + written if read else None)


def _argument(place: int) -> Callable[[Shapes], int]:
    """Counts the elements of the argument at this position."""
    return lambda shapes: math.prod(shapes.dims[place]) if len(shapes.dims) > place else 0


def _rows(weight: int, indices: int) -> Callable[[Shapes], int]:
    """Counts one row of the weight per index."""
    return lambda shapes: math.prod(shapes.dims[indices]) * shapes.dims[weight][-1]


# The number of elements touched by operations that index into a tensor; 0 if unknown.
_INDEXING: Mapping[str, Callable[[Shapes], int]] = {
    "aten::embedding": _rows(0, 1),
    "aten::embedding_dense_backward": _argument(0),
    "aten::gather": _argument(2),
    "aten::scatter": _argument(2),
    "aten::scatter_": _argument(2),
    "aten::scatter_add": _argument(2),
    "aten::scatter_add_": _argument(2),
    "aten::index_copy_": _argument(3),
    "aten::index_add_": _argument(3),
    "aten::index_put_": _argument(2),
    "aten::_index_put_impl_": _argument(2),
    "aten::index_select": lambda shapes: 0,
    "aten::index": lambda shapes: 0,
    "aten::select_backward": _argument(0),
    "aten::slice_backward": _argument(0),
}


def dtype(shapes: Shapes) -> str:
    """Returns the type of the first floating-point tensor; "" if there is none."""
    floats = (
        t
        for d, t in zip(shapes.dims, shapes.types, strict=False)
        if d and ("loat" in t or t in _FLOATS)
    )
    return next(floats, "")


_FLOATS = ("double", "c10::Half")


def _largest(shapes: Shapes) -> int:
    return max((math.prod(d) for d in shapes.dims if d), default=0)


Formula = Callable[[Shapes], tuple[float, float]]


def _product(first: int, second: int) -> Formula:
    """Returns the formula of (..., M, K) · (..., K, N) for the arguments at these positions."""

    def formula(shapes: Shapes) -> tuple[float, float]:
        (*_, inner), right = shapes.dims[first], shapes.dims[second]
        result = math.prod(shapes.dims[first]) // inner * (right[-1] if len(right) > 1 else 1)
        return 2.0 * result * inner, result

    return formula


def _linear(shapes: Shapes) -> tuple[float, float]:
    """x (..., K) and weight (N, K)."""
    rows, (columns, inner) = math.prod(shapes.dims[0][:-1]), shapes.dims[1]
    return 2.0 * rows * columns * inner, rows * columns


def _attention(query: int, causal: int, per_score: int) -> Formula:
    """Returns the formula of attention with q, k, v from position `query` on and the causal flag at
    `causal`. Without the flag, it has no FLOPs.
    """

    def formula(shapes: Shapes) -> tuple[float, float]:
        (*batch, rows, width), keys = shapes.dims[query], shapes.dims[query + 1][-2]
        full = per_score * math.prod(batch) * rows * keys * width
        halves = {"True": 2, "False": 1}[shapes.values[causal]]
        results = 1 if per_score == 4 else 3
        return full / halves, results * math.prod(shapes.dims[query])

    return formula


def _elements(per_element: int) -> Formula:
    return lambda shapes: (
        float(per_element * math.prod(shapes.dims[0])),
        math.prod(shapes.dims[0]),
    )


# The positions of arguments follow the operators' schemas.
_FORMULAS: Mapping[str, Formula] = {
    "aten::mm": _product(0, 1),
    "aten::bmm": _product(0, 1),
    "aten::addmm": _product(1, 2),
    "aten::baddbmm": _product(1, 2),
    "aten::_addmm_activation": _product(1, 2),
    "aten::mkldnn_linear": _linear,
    "aten::_softmax": _elements(5),
    "aten::_log_softmax": _elements(5),
    "aten::_softmax_backward_data": _elements(4),
    "aten::_log_softmax_backward_data": _elements(4),
    "aten::_scaled_dot_product_flash_attention": _attention(0, 4, 4),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(1, 11, 10),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(0, 4, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, 7, 10),
    "aten::_scaled_dot_product_efficient_attention": _attention(0, 6, 4),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(1, 11, 10),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, 6, 4),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, 14, 10),
    "stepgauge::flash_attention": _attention(0, 3, 4),
    "stepgauge::flash_attention_backward": _attention(1, 6, 10),
    "FlashAttentionTriton": _attention(0, 3, 4),
}


def stands_for_all_inside(operation: str) -> bool:
    """True if the operation's formula includes the operations that it calls."""
    return operation in _FORMULAS
