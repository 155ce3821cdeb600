"""The elementwise work of a block: rotary embedding, activation of the feed-forward layer, residual sums.

Passes that calibrate/passes.py times use these times if the hardware file has them. All others are
priced by the bytes that they move.

Legend: M tokens, F width of the feed-forward layer.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term, strided_copy
from stepgauge.spec.model import ModelSpec

# With gate=quack, backward of the activation is part of a product. It lengthens the product by this
# fraction of its own time: 0.10 of 0.23 ms at 16,384 x 6400 on an H200
# (docs/log/2026-11-23-hopper-steps.md).
GATE_BESIDE_PRODUCT = 0.4


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """The elementwise terms of one block, over M tokens.

    rotated  width of queries and keys together
    values   width of the values
    """

    model: ModelSpec
    arithmetic: Arithmetic
    m: int
    rotated: int
    values: int

    @property
    def _widths(self) -> tuple[int, int]:
        return self.rotated, self.values

    @property
    def _heads_as_calibrated(self) -> bool:
        """True if queries and keys are rotated completely and not normed, as in the timed passes."""
        model = self.model
        return model.positions == "rope" and model.rope_fraction == 1 and not model.qk_norm

    @property
    def _timed_sizes(self) -> tuple[float, float]:
        """Sizes at which to look up passes over queries, keys and values.

        They were timed with three parts of equal width. Narrower values make the whole narrower.
        """
        return self.m, (self.rotated + self.values) / 1.5

    def rotation(self) -> Iterator[Term]:
        """Yields the rotation of queries and keys."""
        rotated, values = (n * self.m * self.arithmetic.activation_bytes for n in self._widths)
        # compiled, values are copied out of their product
        nbytes = 2 * (rotated + values) if self.arithmetic.is_compiled else 7 * rotated
        if self._heads_as_calibrated:
            sizes = self._timed_sizes if self.arithmetic.is_compiled else (self.m, self.rotated)
            yield self.arithmetic.timed_pass("attention.rotation", "heads forward", sizes, nbytes)
        else:
            yield Term("attention.rotation", TRAFFIC, (nbytes,))

    def heads_backward(self) -> Iterator[Term]:
        """Yields backward of rotation, of query and key norms, and of the split into q, k and v."""
        arithmetic, model = self.arithmetic, self.model
        rotated, values = (n * self.m * arithmetic.activation_bytes for n in self._widths)
        if self._heads_as_calibrated:
            eager, compiled = 9 * rotated + 10 * values, 2 * (rotated + values)
            nbytes = compiled if arithmetic.is_compiled else eager
            yield arithmetic.timed_pass(
                "attention.rotation_and_split", "heads backward", self._timed_sizes, nbytes
            )
            return
        if model.positions == "rope":
            yield from arithmetic.passes("attention.rotation", rotated, eager=9, compiled=2)
        if model.qk_norm:
            rows = self.m * (self.rotated // model.head_width)
            yield from arithmetic.norm(
                "attention.qk_norm", "backward", model.norm, rows, model.head_width
            )
        # Eager autograd joins the gradients in two copies: first those of queries and keys.
        if arithmetic.is_compiled:
            yield Term("attention.split", TRAFFIC, (2 * values,))
        elif model.positions == "rope" or model.qk_norm:
            yield strided_copy("attention.split", self.m * (2 * self.rotated + self.values))
        else:  # of whole rows
            nbytes = 2 * (2 * rotated + values)
            yield arithmetic.timed_pass(
                "attention.split", "split backward", self._timed_sizes, nbytes
            )

    def gate(self, name: str, direction: str, f: int) -> Iterator[Term]:
        """Yields the activation of the feed-forward layer."""
        model, arithmetic = self.model, self.arithmetic
        eager, compiled = {
            (True, "forward"): (5, 3),
            (False, "forward"): (2, 2),
            (True, "backward"): (13, 5),
            (False, "backward"): (3, 3),
        }[model.is_gated, direction]
        nbytes, sizes = self.m * f * arithmetic.activation_bytes, (self.m, f)
        if model.gate == "quack":
            yield from self._gate_in_products(name, direction, f)
        elif model.feed_forward == "gelu" and not arithmetic.is_compiled:
            yield arithmetic.timed_pass(name, f"gelu {direction}", sizes, nbytes * eager)
        elif model.feed_forward != "swiglu":
            yield from arithmetic.passes(name, nbytes, eager=eager, compiled=compiled)
        else:
            times = compiled if arithmetic.is_compiled else eager
            yield arithmetic.timed_pass(name, f"gate {direction}", sizes, nbytes * times)

    def _gate_in_products(self, name: str, direction: str, f: int) -> Iterator[Term]:
        """Yields what gate=quack costs outside of its products.

        Forward is inside the product. Backward lengthens its product, and copies the first weight
        and its gradient to reorder their rows.
        """
        if direction == "backward":
            nbytes = GATE_BESIDE_PRODUCT * 5 * self.m * f * self.arithmetic.activation_bytes
            yield Term(name, TRAFFIC, (nbytes,))
            weight = 2 * f * self.model.d_model * self.arithmetic.activation_bytes
            yield Term(f"{name}.reorder_weight", TRAFFIC, (2 * weight,))
            yield Term(f"{name}.reorder_gradient", TRAFFIC, (2 * weight,), for_weights=True)

    def residual(self, numel: int, *, ends_graph: bool = False) -> Iterator[Term]:
        """Yields the sum of the residual stream and a branch, whose dtypes differ under autocast.

        Compiled, the sum is part of the norm that follows, unless it is the last of a compiled block.
        """
        arithmetic = self.arithmetic
        nbytes = numel * (2 * arithmetic.residual_bytes + arithmetic.activation_bytes)
        if arithmetic.casts and arithmetic.activation_bytes == 2 and not arithmetic.is_compiled:
            yield Term("residual", "residual mixed", (numel,), nbytes=nbytes)
        else:
            yield from arithmetic.passes("residual", nbytes, eager=1, compiled=ends_graph)
