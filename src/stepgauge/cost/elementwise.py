"""Elementwise work of a block: eager as calibrate/passes.py times it, where a hardware file has that;
compiled, and of parts that it does not time, by the bytes that it moves.

Legend: M tokens, F features of the feed-forward layer.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.terms import Arithmetic, Term
from stepgauge.spec.model import ModelSpec


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """Of a network in an arithmetic, of M tokens.

    rotated  features of queries and keys together; `values` of values
    """

    model: ModelSpec
    how: Arithmetic
    m: int
    rotated: int
    values: float

    @property
    def _has_usual_heads(self) -> bool:
        """Eager ones as they are timed: as many keys as queries, all of each rotated."""
        model = self.model
        is_usual = model.positions == "rope" and model.rope_fraction == 1 and not model.qk_norm
        return is_usual and model.kv_heads == model.num_heads and not self.how.is_compiled

    def rotation(self) -> Iterator[Term]:
        nbytes = self.m * self.rotated * self.how.activation
        if self._has_usual_heads:
            sizes = (self.m, self.rotated)
            yield self.how.elementwise("attention.rotation", "heads forward", sizes, 7 * nbytes)
        else:
            yield from self.how.passes("attention.rotation", nbytes, eager=7, compiled=2)

    def heads_backward(self) -> Iterator[Term]:
        """Of the rotation, of norms of queries and keys, and of the split into three."""
        how, model, a = self.how, self.model, self.how.activation
        rotated, values = self.m * self.rotated * a, self.m * self.values * a
        if self._has_usual_heads:
            sizes, nbytes = (self.m, self.rotated), 9 * rotated + 10 * values
            yield how.elementwise("attention.heads", "heads backward", sizes, nbytes)
            return
        if model.positions == "rope":
            yield from how.passes("attention.rotation", rotated, eager=9, compiled=2)
        if model.qk_norm:
            rows = self.m * (self.rotated // model.head_width)
            yield from how.norm("attention.qk_norm", "backward", model.norm, rows, model.head_width)
        yield from how.passes("attention.split", values, eager=10, compiled=2)

    def gate(self, name: str, direction: str, f: int) -> Iterator[Term]:
        """The activation of the feed-forward layer."""
        eager, compiled = {
            (True, "forward"): (5, 3),
            (False, "forward"): (2, 2),
            (True, "backward"): (13, 6),
            (False, "backward"): (3, 4),
        }[self.model.is_gated, direction]
        nbytes = self.m * f * self.how.activation
        if self.model.feed_forward == "swiglu" and not self.how.is_compiled:
            yield self.how.elementwise(name, f"gate {direction}", (self.m, f), nbytes * eager)
        else:
            yield from self.how.passes(name, nbytes, eager=eager, compiled=compiled)

    def residual(self, numel: int, *, compiled: float) -> Iterator[Term]:
        """The sum of the residual stream and a branch: of two types under autocast."""
        nbytes = numel * (2 * self.how.residual + self.how.activation)
        if self.how.casts and self.how.activation == 2 and not self.how.is_compiled:
            yield Term("residual", "residual mixed", (numel,), nbytes=nbytes)
        else:
            yield from self.how.passes("residual", 1, eager=nbytes, compiled=numel * compiled)
