"""Messages with gradients of norms and of biases of row layers, which tensor-parallel ranks sum
(parallel/tensor_parallel/gradient_sums.py).

Each rank has the sum over its own tokens or, for the norms of queries and of keys, over its own heads.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from stepgauge.cost.operations.rank_sizes import ShareSizes
from stepgauge.cost.operations.terms import Term
from stepgauge.spec.model_fields import NORMS
from stepgauge.spec.plan.tensor import KINDS, Rule

OF_HEADS, OF_ROWS = "qk_norm", "biases of row layers"
PER_BLOCK = {"attention_norm": 1, "feed_forward_norm": 1, OF_HEADS: 2, OF_ROWS: 1}
OF_END = "norm"


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """The gradients that a rank's stage sums.

    sizes     values per gradient, by module; only of those that are summed
    itemsize  bytes of a value
    at_once   a data axis reads each gradient during backward; otherwise one message at its end has all
    """

    sizes: Mapping[str, int]
    itemsize: int
    at_once: bool

    def during_backward(self, name: str, module: str) -> Iterator[Term]:
        """Yields the messages with the gradients of a module, if they are sent at once."""
        if self.at_once:
            yield from self._message(name, self.sizes.get(module, 0), PER_BLOCK.get(module, 1))

    def at_end(self, blocks: int, *, is_last: bool) -> Iterator[Term]:
        """Yields the message with the gradients of so many blocks and, in the last stage, of the norm before
        the head.
        """
        if not self.at_once:
            of_block = sum(times * self.sizes.get(name, 0) for name, times in PER_BLOCK.items())
            of_end = self.sizes.get(OF_END, 0) if is_last else 0
            yield from self._message("gradients", blocks * of_block + of_end)

    def _message(self, name: str, values: int, count: int = 1) -> Iterator[Term]:
        if values:
            yield Term(f"{name}.sum", "all_reduce", (values * self.itemsize,), count, axis="tensor")


def gradient_sums_of(
    rank: ShareSizes, rule_of: Callable[[str], Rule | None], itemsize: int
) -> GradientSums:
    """Returns the gradients of which each tensor rank has a summand, of `itemsize` bytes a value."""
    model = rank.model
    rules = ((module, rule_of(module)) for module in (*PER_BLOCK, OF_END))
    summed = (module for module, rule in rules if rule and KINDS[rule.kind].sums)
    sizes = dict.fromkeys(summed, rank.norm_parameters)
    if rank.share.tensor > 1:
        biases = (model.attention_bias == "all") + model.feed_forward_bias
        sizes[OF_ROWS] = biases * model.d_model
        head_width = model.head_width if model.qk_norm else 0
        sizes[OF_HEADS] = NORMS[model.norm].parameters * head_width
    return GradientSums(sizes, itemsize, rank.share.averaged)
