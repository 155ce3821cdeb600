"""When the fused linear + cross-entropy uses torch's own operators, and its logits memory limit.

Small sizes are launch-bound: torch's operators take less host time than the fused loop, and when
compiled they read the logits only once. The crossover was measured for bf16 forward and backward on
one H200: benchmarks/results/2026-11-21-h200-kernels-third.jsonl.
"""

from typing import NamedTuple

from stepgauge.spec.calibration import ALIGNED
from stepgauge.spec.units import round_up


class Measured(NamedTuple):
    tokens: int
    width: int
    vocabulary: int
    fused_ms: float
    torch_ms: float


# Sizes at which torch is faster; the largest is the limit. At the next size measured,
# 8192 x 4096 x 32,000, the fused loop is faster: 9.61 ms, against 10.03 compiled and 12.0 eager.
# Eager torch and the fused loop take about as long at 2048 x 2560 x 10,000 (0.677 and 0.660 ms).
COMPILED = (Measured(2048, 768, 10_000, 0.688, 0.471), Measured(2048, 2560, 10_000, 0.660, 0.491))
EAGER = (Measured(2048, 768, 10_000, 0.688, 0.412),)

MOST_LOGITS = max(row.tokens * row.vocabulary for row in (*COMPILED, *EAGER))
MOST_PRODUCTS_EAGER = max(row.tokens * row.width * row.vocabulary for row in EAGER)


def torch_computes(tokens: int, width: int, vocabulary: int, *, compiled: bool) -> bool:
    """Returns True if torch was measured faster at this size or a larger one.

    Torch holds all logits in memory, so their number is limited however narrow the network is.
    """
    logits = tokens * vocabulary
    is_small = compiled or logits * width <= MOST_PRODUCTS_EAGER
    return is_small and logits <= MOST_LOGITS


# Rows of logits begin at multiples of 128 bytes, which matmuls and 16-byte loads need if the vocabulary is
# odd (50,257).
ROW_MULTIPLE = 64


def operand_rows(words: int, itemsize: int) -> int:
    """Returns the rows of the weight in products: a multiple of ROW_MULTIPLE in 16 bits if ALIGNED does not
    divide the words. With 50,257 rows, cuBLAS selects kernels that run at a seventh of the rate.

    Padding costs a copy of the weight, which a cast would need anyway.
    """
    is_unaligned = itemsize == 2 and words % ALIGNED
    return round_up(words, ROW_MULTIPLE) if is_unaligned else words


# With this limit, 16,384 tokens and a vocabulary of 128,256 in bf16 make 8 chunks of 2048 tokens.
MOST_LOGITS_BYTES = 512 * 2**20
# Up to this many tokens per column of the hidden states, everything is one chunk: its logits are at
# most four times as large as the weight, and the weight's gradient is rounded once, as in torch.
WHOLE_UP_TO = 4


def logits_bytes(tokens: int, width: int, row_bytes: int) -> int:
    """Returns the default limit on the bytes of logits that are held at once."""
    whole = tokens * row_bytes if tokens <= WHOLE_UP_TO * width else 0
    return max(MOST_LOGITS_BYTES, whole)
