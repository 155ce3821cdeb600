"""Elementwise work of a block as calibrate/passes.py times it, where a hardware file has that; of
parts that it does not time by the bytes that it moves.

Legend: M tokens, F features of the feed-forward layer.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term, strided_copy
from stepgauge.spec.model import ModelSpec

# Of the time that the gate's backward takes by itself, what it adds to a product that it is part of:
# 0.10 of 0.23 ms at 16,384 x 6400 on an H200 (docs/log/2026-11-23-hopper-steps.md).
GATE_BESIDE_PRODUCT = 0.4


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """Of a network in an arithmetic, of M tokens.

    rotated  features of queries and keys together; `values` of values
    """

    model: ModelSpec
    how: Arithmetic
    m: int
    rotated: int
    values: int

    @property
    def _has_usual_heads(self) -> bool:
        """As they are timed: all of queries and keys rotated, none normed."""
        model = self.model
        return model.positions == "rope" and model.rope_fraction == 1 and not model.qk_norm

    def rotation(self) -> Iterator[Term]:
        nbytes, sizes = self.m * self.rotated * self.how.activation, (self.m, self.rotated)
        times = 2 if self.how.is_compiled else 7
        if self._has_usual_heads:
            yield self.how.timed_pass("attention.rotation", "heads forward", sizes, nbytes * times)
        else:
            yield Term("attention.rotation", TRAFFIC, (nbytes * times,))

    def heads_backward(self) -> Iterator[Term]:
        """Of the rotation, of norms of queries and keys, and of the split into three."""
        how, model, a = self.how, self.model, self.how.activation
        rotated, values = self.m * self.rotated * a, self.m * self.values * a
        if self._has_usual_heads:
            nbytes = 2 * (rotated + values) if how.is_compiled else 9 * rotated + 10 * values
            # timed with a third of all for values: fewer of them are a narrower whole
            sizes = (self.m, (self.rotated + self.values) / 1.5)
            yield how.timed_pass("attention.heads", "heads backward", sizes, nbytes)
            return
        if model.positions == "rope":
            yield from how.passes("attention.rotation", rotated, eager=9, compiled=2)
        if model.qk_norm:
            rows = self.m * (self.rotated // model.head_width)
            yield from how.norm("attention.qk_norm", "backward", model.norm, rows, model.head_width)
        # the parts' gradients put together in two steps, queries and keys first
        joined = 2 * self.rotated + self.values
        copy = strided_copy("attention.split", self.m * joined)
        if how.is_compiled:
            yield Term("attention.split", TRAFFIC, (2 * values,))
        elif model.positions == "rope" or model.qk_norm:
            yield copy
        else:
            sizes = (self.m, (self.rotated + self.values) / 1.5)  # as heads
            yield how.timed_pass("attention.split", "split backward", sizes, copy.nbytes)

    def gate(self, name: str, direction: str, f: int) -> Iterator[Term]:
        """The activation of the feed-forward layer."""
        eager, compiled = {
            (True, "forward"): (5, 3),
            (False, "forward"): (2, 2),
            (True, "backward"): (13, 6),
            (False, "backward"): (3, 4),
        }[self.model.is_gated, direction]
        nbytes, sizes = self.m * f * self.how.activation, (self.m, f)
        if self.model.gate == "quack":
            yield from self._gate_in_products(name, direction, f)
        elif self.model.feed_forward == "gelu" and not self.how.is_compiled:
            yield self.how.timed_pass(name, f"gelu {direction}", sizes, nbytes * eager)
        elif self.model.feed_forward != "swiglu":
            yield from self.how.passes(name, nbytes, eager=eager, compiled=compiled)
        elif direction == "backward" and self.how.is_compiled:
            # It also computes the input of the down projection again.
            yield self.how.timed_pass(name, "gate backward", sizes, nbytes * (compiled - 1))
            yield Term(f"{name}.again", TRAFFIC, (nbytes,))
        else:
            times = compiled if self.how.is_compiled else eager
            yield self.how.timed_pass(name, f"gate {direction}", sizes, nbytes * times)

    def _gate_in_products(self, name: str, direction: str, f: int) -> Iterator[Term]:
        """Within the product forward; backward what of the pass its product does not hide, and
        copies of the first weight and of its gradient with their rows in another order.
        """
        if direction == "backward":
            nbytes = GATE_BESIDE_PRODUCT * 5 * self.m * f * self.how.activation
            yield Term(name, TRAFFIC, (nbytes,))
            weight = 2 * f * self.model.d_model * self.how.activation
            yield Term(f"{name}.rows", TRAFFIC, (2 * weight,))
            yield Term(f"{name}.gradient_rows", TRAFFIC, (2 * weight,), weights=True)

    def residual(self, numel: int) -> Iterator[Term]:
        """The sum of the residual stream and a branch: of two types under autocast. Compiled, it is
        part of the norm that follows.
        """
        nbytes = numel * (2 * self.how.residual + self.how.activation)
        if self.how.casts and self.how.activation == 2 and not self.how.is_compiled:
            yield Term("residual", "residual mixed", (numel,), nbytes=nbytes)
        else:
            yield from self.how.passes("residual", nbytes, eager=1, compiled=0)
