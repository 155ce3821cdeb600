"""torch's loss over all logits, F.cross_entropy.

Legend: M tokens, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term

# Autocast on a GPU: forward reads logits and writes their log-softmax in 16 bits, and casts it to fp32 for the
# loss of each token; backward clears a gradient in fp32, casts it to 16 bits, and reads it with the
# log-softmax for the gradient of the logits. Per logit, that takes as long as a plain pass over so many bytes
# (8192 tokens, 32,000 words on an H200: benchmarks/results/2026-11-30-h200-calibration-large.jsonl).
AUTOCAST_BYTES = {"forward": 20.0, "backward": 17.5}


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """The terms of the loss, by formula. Compiled, it is a pass over memory.

    arithmetic  of the head
    autocasts   logits are in 16 bits, and autocast computes part of the loss in fp32: on a GPU as above,
                elsewhere all of it, after a cast of the logits
    on_gpu      runs on a CUDA GPU
    """

    arithmetic: Arithmetic
    autocasts: bool
    on_gpu: bool

    def forward(self, m: int, v: int) -> Iterator[Term]:
        if self._casts_logits:
            yield Term("loss.cast", "cast bf16 fp32", (m * v,))
        yield self._loss("forward", m, v)

    def backward(self, m: int, v: int) -> Iterator[Term]:
        yield self._loss("backward", m, v)
        if self._casts_logits:
            yield Term("loss.cast", "cast fp32 bf16", (m * v,))

    @property
    def _casts_logits(self) -> bool:
        return self.autocasts and not self.on_gpu

    def _loss(self, direction: str, m: int, v: int) -> Term:
        if self.arithmetic.is_compiled:
            return Term("loss", TRAFFIC, (m * v * 2 * self.arithmetic.activation_bytes,))
        if self.autocasts and self.on_gpu:
            nbytes = AUTOCAST_BYTES[direction] * m * v
            return Term("loss", f"cross-entropy autocast {direction}", (m, v), nbytes=nbytes)
        # fp32 logits were timed: as many words as have the same bytes
        words = v if self.autocasts else v * self.arithmetic.activation_bytes / 4
        return Term("loss", f"cross-entropy {direction}", (m, words))
