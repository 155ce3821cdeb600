"""Which sizes of the fused linear + cross-entropy torch computes, by measured crossover.

Small ones are over before their launches are: torch's own operators take the host less time than the
fused loop, and compiled they read the logits once. bf16 on CUDA, forward and backward; rows of
benchmarks/results/2026-11-21-h200-kernels-third.jsonl, one H200.
"""

from typing import NamedTuple


class Measured(NamedTuple):
    tokens: int
    width: int
    vocabulary: int
    fused_ms: float
    torch_ms: float


# The largest of each is the limit: the next one measured, 8192 x 4096 x 32,000, is faster fused (9.61 ms,
# compiled 10.03, eager 12.0). Eager, 2048 x 2560 x 10,000 is a draw (0.660 and 0.677).
COMPILED = (Measured(2048, 768, 10_000, 0.688, 0.471), Measured(2048, 2560, 10_000, 0.660, 0.491))
EAGER = (Measured(2048, 768, 10_000, 0.688, 0.412),)

MOST_LOGITS_COMPILED = max(row.tokens * row.vocabulary for row in COMPILED)
MOST_PRODUCTS_EAGER = max(row.tokens * row.width * row.vocabulary for row in EAGER)


def torch_computes(tokens: int, width: int, vocabulary: int, *, compiled: bool) -> bool:
    """Whether torch was measured faster at no smaller a size."""
    logits = tokens * vocabulary
    return logits <= MOST_LOGITS_COMPILED if compiled else logits * width <= MOST_PRODUCTS_EAGER
