"""The fused head and loss (kernels/linear_cross_entropy/chunked.py).

It loops over chunks of tokens and computes the gradients in forward already, so that backward has
nothing left to compute.

Legend: M tokens, D model width, V vocabulary, C tokens of a chunk.
"""

import math
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term
from stepgauge.spec.fused_loss import logits_bytes, operand_rows

# Sizes of kernels/linear_cross_entropy. Between the products, a chunk's logits are read and written
# once if a row fits into registers, otherwise read twice and written once. On a CPU, plain PyTorch
# keeps fp32 copies, and eight elementwise operations read and write each of them.
MAX_LOGITS_BYTES_PLAIN = 64 * 2**20
MAX_ROW_IN_REGISTERS = 16_384
PASSES_PLAIN = 16


def fused_forward(arithmetic: Arithmetic, m: int, v: int, d: int, device: str) -> Iterator[Term]:
    """Yields logits, loss and both gradients, in chunks of tokens."""
    is_plain, itemsize = device.startswith("cpu"), arithmetic.activation_bytes
    if arithmetic.casts:
        yield arithmetic.cast("head.cast_weight", "cast fp32 bf16", v * d)
        yield arithmetic.cast("head.cast_input", "cast fp32 bf16", m * d)
    chunk_bytes = MAX_LOGITS_BYTES_PLAIN if is_plain else logits_bytes(m, d, v * itemsize)
    chunks = math.ceil(m * v * itemsize / chunk_bytes)
    c = math.ceil(m / chunks)
    rows = operand_rows(v, itemsize)
    yield Term("head", f"matmul nt {arithmetic.dtype}", (c, rows, d), chunks)
    passes = 2 if v <= MAX_ROW_IN_REGISTERS else 3
    value_bytes = 4 * PASSES_PLAIN if is_plain else passes * itemsize
    yield Term("loss", TRAFFIC, (c * v * value_bytes,), chunks)
    yield Term("head.input_gradient", f"matmul nn {arithmetic.dtype}", (c, d, rows), chunks)
    yield Term("head.weight_gradient", f"matmul tn {arithmetic.dtype}", (rows, d, c), chunks)
    if chunks > 1:  # all but the first add to the weight gradient
        yield Term(
            "head.add_gradient", TRAFFIC, (2 * v * d * arithmetic.residual_bytes,), chunks - 1
        )


def fused_backward(v: int, d: int) -> Iterator[Term]:
    """Yields the one launch of backward: it finds that the gradients are to be multiplied by 1."""
    yield Term("head.gradient", TRAFFIC, (0,), gradient=v * d)
