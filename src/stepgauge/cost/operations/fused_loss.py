"""The fused head and loss as terms: a loop over chunks of tokens that forms the gradients in forward,
so that backward has nothing left to compute (kernels/linear_cross_entropy/chunked.py).

Legend: M tokens, D model width, V vocabulary.
"""

import math
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term
from stepgauge.spec.fused_loss import logits_bytes

# As kernels/linear_cross_entropy: how often a chunk's row is read and written between the products:
# once each while it stays in registers, else read twice. Plain PyTorch, on a CPU, holds fp32 copies:
# its eight elementwise operations read and write each.
MOST_LOGITS_PLAIN = 64 * 2**20
LONGEST_HELD_ROW = 16_384
PASSES_PLAIN = 16


def most_logits(device: str, m: int, v: int, d: int, itemsize: int) -> int:
    """Bytes of a chunk's logits."""
    return MOST_LOGITS_PLAIN if device.startswith("cpu") else logits_bytes(m, d, v * itemsize)


def fused_forward(how: Arithmetic, m: int, v: int, d: int, device: str) -> Iterator[Term]:
    """Logits, loss, and both gradients, a chunk at a time."""
    is_plain, a = device.startswith("cpu"), how.activation
    if how.casts:
        yield how.cast("head.cast_weight", "cast fp32 bf16", v * d)
        yield how.cast("head.cast_input", "cast fp32 bf16", m * d)
    chunks = math.ceil(m * v * a / most_logits(device, m, v, d, a))
    c = math.ceil(m / chunks)
    yield Term("head", f"matmul nt {how.type}", (c, v, d), chunks)
    times = 2 if v <= LONGEST_HELD_ROW else 3
    yield Term("loss", TRAFFIC, (c * v * (4 * PASSES_PLAIN if is_plain else times * a),), chunks)
    yield Term("head.input_gradient", f"matmul nn {how.type}", (c, d, v), chunks)
    yield Term("head.weight_gradient", f"matmul tn {how.type}", (v, d, c), chunks)
    if chunks > 1:  # later chunks add to the sum
        yield Term("head.sum", TRAFFIC, (2 * v * d * how.residual,), chunks - 1)


def fused_backward(v: int, d: int) -> Iterator[Term]:
    """The gradients are there: one launch sees that they are multiplied by one."""
    yield Term("head.gradient", TRAFFIC, (0,), gradient=v * d)
