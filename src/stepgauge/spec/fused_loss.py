"""Which sizes of the fused linear + cross-entropy torch computes, by measured crossover, and how many
logits the loop of the others holds.

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

MOST_LOGITS = max(row.tokens * row.vocabulary for row in (*COMPILED, *EAGER))
MOST_PRODUCTS_EAGER = max(row.tokens * row.width * row.vocabulary for row in EAGER)


def torch_computes(tokens: int, width: int, vocabulary: int, *, compiled: bool) -> bool:
    """Whether torch was measured faster at no smaller a size. It holds all logits, so that a narrow
    network's many tokens stay with the fused loop.
    """
    logits = tokens * vocabulary
    is_short = compiled or logits * width <= MOST_PRODUCTS_EAGER
    return is_short and logits <= MOST_LOGITS


# 16,384 tokens of a vocabulary of 128,256 in bf16 are then 8 chunks of 2048.
MOST_LOGITS_BYTES = 512 * 2**20
# Up to so many tokens for each column of the hidden states there is one chunk: its logits are at most
# four times the weight's bytes, and the weight's gradient is rounded once, as one product rounds it.
WHOLE_UP_TO = 4


def logits_bytes(tokens: int, width: int, row_bytes: int) -> int:
    """The most bytes of logits that are held where nobody sets a limit."""
    whole = tokens * row_bytes if tokens <= WHOLE_UP_TO * width else 0
    return max(MOST_LOGITS_BYTES, whole)
