"""Attention of ranks that exchange heads, as terms: what head_exchange.py of parallel/ does.

A rank attends over all tokens with its share of the heads, in groups. Queries, keys and values of
the first group are waited for; those of the next travel beside its attention, as its output does
beside the attention of the next. Backward is the mirror, with as many bytes.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, TRANSFER, Term
from stepgauge.spec.plan.context import num_head_groups


@dataclasses.dataclass(frozen=True)
class HeadExchanges:
    """Values of a rank's queries and of its keys and values, bytes of each, and heads of keys of all
    ranks.
    """

    ranks: int
    queries: float
    keys: float
    itemsize: int
    key_heads: int

    def terms(self, attention: Term) -> Iterator[Term]:
        """`attention`: of a rank's heads over all tokens. In either direction."""
        groups = num_head_groups(self.key_heads, self.ranks)
        heads, *rest = attention.sizes
        own = dataclasses.replace(attention, sizes=(heads / groups, *rest))
        qkv, o = ((self.queries + self.keys) / groups, self.queries / groups)
        yield self._pass("packed", self.queries + self.keys)
        yield self._sent("heads", qkv)
        for group in range(groups):
            yield own
            if group < groups - 1:
                yield self._sent("heads", qkv, own)
                yield self._sent("outputs", o, own)
        yield self._sent("outputs", o)
        yield self._pass("unpacked", self.queries)

    def _pass(self, name: str, values: float) -> Term:
        return Term(f"attention.{name}", TRAFFIC, (2 * values * self.itemsize,))

    def _sent(self, name: str, values: float, *beside: Term) -> Term:
        nbytes = values * self.itemsize * (self.ranks - 1) / self.ranks
        return Term(f"attention.{name}", TRANSFER, (nbytes,), axis="context", beside=beside)
