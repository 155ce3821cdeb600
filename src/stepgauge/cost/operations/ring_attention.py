"""Attention of ranks that share each sequence, as terms: what ring_attention.py of parallel/
does with the keys that travel around the ring by messages (spec/plan/context.py).

A rank's own keys meet its queries under the causal mask; of each other rank's keys, or of its own
queries, a half does, without a mask: as many pairs. Keys are sent beside the attention that does not
need them, and gradients of keys come home behind it. In backward the first half of the own heads
hides the first keys, and the second half the last gradients.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.spec.units import ceil_div

RING = "attention.ring."  # what names begin with of its terms, which are one operator
WIDE = 4  # bytes of a value that is summed over more than two parts


@dataclasses.dataclass(frozen=True)
class Ring:
    """Values of a rank's queries and of its keys and values, bytes of each, and heads of keys."""

    ranks: int
    queries: float
    keys: float
    itemsize: int
    key_heads: int

    @property
    def summed(self) -> int:
        """Bytes of a value of o, and of the gradients that a rank adds up."""
        return WIDE if self.ranks > 2 else self.itemsize

    def forward(self, attention: Term) -> Iterator[Term]:
        """`attention`: of the rank's own tokens."""
        q, kv, a = self.queries, self.keys, self.itemsize
        yield self._pass("stacked", 2 * kv * a)
        for meeting in range(self.ranks):
            yield attention
            if meeting < self.ranks - 1:
                yield self._sent("keys", kv * a, attention)
            if meeting:  # o scaled, and the part added to it by its share
                yield self._pass("merged", q * (2 * self.summed + 2 * WIDE + a))
        if self.summed > a:
            yield self._pass("widened", q * (a + WIDE))
            yield self._pass("narrowed", q * (a + WIDE))

    def backward(self, attention: Term) -> Iterator[Term]:
        q, kv, a, others = self.queries, self.keys, self.itemsize, self.ranks - 1
        first, second = self._halves(attention)
        queries = self._pass("queries summed", others * q * (2 * self.summed + a))
        yield self._pass("stacked", 2 * kv * a)
        yield from (*first, self._sent("keys", kv * a, *first))
        for meeting in range(1, others + 1):
            yield attention
            if meeting < others:
                yield self._sent("keys", kv * a, attention)
            yield self._pass("keys summed", kv * self._given(meeting))
            hides = (attention,) if meeting < others else (*second, queries)
            yield self._sent("gradients", kv * (a if meeting == 1 else WIDE), *hides)
        yield from (*second, queries)
        yield self._pass("own written", (q + kv) * (a + self.summed))
        yield self._pass("own added", kv * 3 * self.summed)
        if self.summed > a:
            yield self._pass("narrowed", (q + kv) * (a + WIDE))

    def _halves(self, attention: Term) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """Of the own heads: a head of keys goes with all its heads of queries."""
        heads, *rest = attention.sizes
        first = heads * ceil_div(self.key_heads, 2) / self.key_heads
        parts = (dataclasses.replace(attention, sizes=(n, *rest)) for n in (first, heads - first))
        one, other = ((part,) if part.sizes[0] else () for part in parts)
        return one, other

    def _given(self, meeting: int) -> int:
        """Bytes moved for each value of the gradients of keys that go on: a part is added to zeros,
        to a sum that is made wide for it, or to a wide one.
        """
        a = self.itemsize
        if meeting == 1:
            return 4 * a
        return 2 * WIDE + a + (WIDE + a if meeting == 2 and a < WIDE else 0)

    def _pass(self, name: str, nbytes: float) -> Term:
        return Term(f"{RING}{name}", TRAFFIC, (nbytes,))

    def _sent(self, name: str, nbytes: float, *beside: Term) -> Term:
        return Term(f"{RING}{name}", "send_recv", (nbytes,), axis="context", beside=beside)
