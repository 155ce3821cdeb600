"""torch's loss over all logits, F.cross_entropy. Compiled, it is a pass over memory.

Legend: M tokens, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term

# Bytes per logit that autocast's kernels move on a GPU. Forward reads logits and writes their log-softmax
# in 16 bits, and casts it to fp32 for the loss of each token. Backward clears a gradient in fp32, casts
# it to 16 bits, and reads it with the log-softmax for that of the logits.
AUTOCAST_BYTES = {"forward": 2 + 2 + 2 + 4, "backward": 4 + 4 + 2 + 2 + 2 + 2}


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """The terms of the loss, by formula.

    arithmetic  of the head
    autocasts   logits are in 16 bits, and autocast computes part of the loss in fp32
    device      cpu, cuda, ...
    """

    arithmetic: Arithmetic
    autocasts: bool
    device: str

    def forward(self, m: int, v: int) -> Iterator[Term]:
        if self.autocasts and not self.device.startswith("cuda"):
            yield Term("loss.cast", "cast bf16 fp32", (m * v,))
        yield self._loss("forward", m, v)

    def backward(self, m: int, v: int) -> Iterator[Term]:
        yield self._loss("backward", m, v)
        if self.autocasts and not self.device.startswith("cuda"):
            yield Term("loss.cast", "cast fp32 bf16", (m * v,))

    def _loss(self, direction: str, m: int, v: int) -> Term:
        if self.arithmetic.is_compiled:
            return Term("loss", TRAFFIC, (m * v * 2 * self.arithmetic.activation_bytes,))
        if self.autocasts and self.device.startswith("cuda"):
            nbytes = AUTOCAST_BYTES[direction] * m * v
            return Term("loss", f"cross-entropy autocast {direction}", (m, v), nbytes=nbytes)
        # fp32 logits were timed: as many words as have the same bytes
        words = v if self.autocasts else v * self.arithmetic.activation_bytes / 4
        return Term("loss", f"cross-entropy {direction}", (m, words))
