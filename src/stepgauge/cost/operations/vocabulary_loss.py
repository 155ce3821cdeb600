"""The loss over parts of the vocabulary (parallel/tensor_parallel/vocabulary_loss.py)."""

from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Term

# A pass over the logits takes as long per logit as a plain pass over so many bytes, measured on an H200
# (benchmarks/results/2026-11-30-h200-vocabulary-loss.jsonl): the largest logit of each token, by the bytes of a
# logit; and for the gradient softmax and its scaling, 8.5 + 17.7 in bf16 and 13.5 + 12 in fp32.
LARGEST_BYTES = {2: 3.7, 4: 5.0}
GRADIENT_BYTES = 26.0


def vocabulary_loss_forward(tokens: int, words: int, itemsize: int) -> Iterator[Term]:
    """Yields the passes over a rank's logits, and the sums over ranks."""
    values = tokens * words
    yield Term("loss.largest", TRAFFIC, (values * LARGEST_BYTES[itemsize],))
    yield Term("loss.max", "all_reduce", (tokens * 4,), axis="tensor")
    if itemsize == 2:
        yield Term("loss.cast", "cast bf16 fp32", (values,))
    yield Term("loss", "cross-entropy forward", (tokens, words))
    yield Term("loss.sum", "all_reduce", (tokens * 8,), axis="tensor")


def vocabulary_loss_backward(tokens: int, words: int) -> Iterator[Term]:
    """Yields the softmax again, scaled by what each token counts."""
    yield Term("loss", TRAFFIC, (tokens * words * GRADIENT_BYTES,))
