"""Messages with gradients of which each tensor-parallel rank has a summand (parallel/tensor_parallel/gradient_sums.py).

For norms and biases of row layers, a rank has the sum over its own tokens; for norms of queries and of keys, that
over its own heads; for keys and values that several ranks share, that of its own queries.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from stepgauge.cost.operations.rank_sizes import ShareSizes
from stepgauge.cost.operations.terms import Term
from stepgauge.spec.model_fields import NORMS
from stepgauge.spec.plan.tensor import KINDS, Rule

BLOCK_NORMS, END_NORM = ("attention_norm", "feed_forward_norm"), "norm"
HEAD_NORMS, ROW_BIASES = "qk_norm", "biases of row layers"
SHARED_KEYS = ("keys and values that ranks share", "their biases")


class Gradients(NamedTuple):
    """A `number` of gradients in one block, each of so many `values`."""

    values: int
    number: int = 1


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """The gradients that a rank's stage sums.

    of        by module
    itemsize  bytes of a value
    at_once   a data axis reads each gradient during backward; otherwise one message at its end has all that are
              whole. Shared keys are a part of their weight, and are sent at once.
    """

    of: Mapping[str, Gradients]
    itemsize: int
    at_once: bool

    def during_backward(self, name: str, *modules: str) -> Iterator[Term]:
        """Yields the messages with the gradients of modules, if they are sent at once."""
        for module in modules:
            if module in self.of and (self.at_once or module in SHARED_KEYS):
                yield self._message(name, *self.of[module])

    def at_end(self, blocks: int, *, is_last: bool) -> Iterator[Term]:
        """Yields the message with the gradients of so many blocks and, in the last stage, of the norm before
        the head.
        """
        times = dict.fromkeys(self.of, blocks) | dict.fromkeys(SHARED_KEYS, 0)
        times[END_NORM] = int(is_last)
        values = sum(each.values * each.number * times[name] for name, each in self.of.items())
        if values and not self.at_once:
            yield self._message("gradients", values)

    def _message(self, name: str, values: int, count: int = 1) -> Term:
        return Term(f"{name}.sum", "all_reduce", (values * self.itemsize,), count, axis="tensor")


def gradient_sums_of(
    rank: ShareSizes, rule_of: Callable[[str], Rule | None], itemsize: int
) -> GradientSums:
    """Returns what a rank sums. A value has `itemsize` bytes; rule_of gives a module's rule in the table."""
    model, width = rank.model, rank.model.head_width
    rules = ((module, rule_of(module)) for module in (*BLOCK_NORMS, END_NORM))
    norms = (module for module, rule in rules if rule and KINDS[rule.kind].sums)
    of = dict.fromkeys(norms, Gradients(rank.norm_parameters))
    if rank.share.tensor > 1:
        if number := (model.attention_bias == "all") + model.feed_forward_bias:
            of[ROW_BIASES] = Gradients(model.d_model, number)
        if model.qk_norm:
            of[HEAD_NORMS] = Gradients(NORMS[model.norm].parameters * width, 2)
        if model.kv_heads < rank.share.tensor:
            weights, biases = SHARED_KEYS
            of[weights] = Gradients(model.kv_heads * width * model.d_model, 2)
            if model.attention_bias != "none":
                of[biases] = Gradients(model.kv_heads * width, 2)
    return GradientSums(of, itemsize, rank.share.averaged)
