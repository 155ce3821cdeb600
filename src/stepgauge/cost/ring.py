"""Attention of ranks that share each sequence, as terms: what parallel/context_parallel.py does with
the keys that travel around the ring (spec/plan/context.py).

A rank's own keys meet its queries under the causal mask; of each other rank's keys, or of its own
queries, a half does, without a mask: as many pairs. Keys are sent beside the attention that does not
need them; gradients of keys come home behind it, the last of them beside nothing.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.terms import TRAFFIC, Term

WIDE = 4  # bytes of a value that is summed over meetings


@dataclasses.dataclass(frozen=True)
class Ring:
    """Values of a rank's queries and of its keys and values, and bytes of each."""

    ranks: int
    queries: float
    keys: float
    itemsize: int

    def forward(self, attention: Term) -> Iterator[Term]:
        """`attention`: of the rank's own tokens."""
        q, kv, a = self.queries, self.keys, self.itemsize
        yield self._pass("stacked", 2 * kv * a)
        for meeting in range(self.ranks):
            yield attention
            if meeting < self.ranks - 1:
                yield self._sent("keys", kv * a, attention)
            if meeting:  # o scaled, and the part added to it by its share
                yield self._pass("merged", q * (4 * WIDE + a))
        yield self._pass("widened", q * (a + WIDE))
        yield self._pass("narrowed", q * (a + WIDE))

    def backward(self, attention: Term) -> Iterator[Term]:
        q, kv, a = self.queries, self.keys, self.itemsize
        summed = WIDE if self.ranks > 2 else a
        yield self._pass("stacked", 4 * kv * a)
        for meeting in range(self.ranks):
            yield attention
            if meeting < self.ranks - 1:
                yield self._sent("keys", kv * a, attention)
            if meeting:
                yield self._pass("queries summed", q * (2 * summed + a))
                yield self._pass("keys summed", kv * (3 * summed + a))
                hides = (attention,) if meeting < self.ranks - 1 else ()
                yield self._sent("gradients", kv * summed, *hides)
        yield self._pass("own added", kv * (2 * summed + a))

    def _pass(self, name: str, nbytes: float) -> Term:
        return Term(f"attention.{name}", TRAFFIC, (nbytes,))

    def _sent(self, name: str, nbytes: float, *beside: Term) -> Term:
        return Term(f"attention.{name}", "send_recv", (nbytes,), axis="context", beside=beside)
