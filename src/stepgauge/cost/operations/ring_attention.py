"""Context-parallel attention in a ring, as ring_attention.py of parallel/ runs it by messages.

Keys and values travel around the ring (spec/plan/context.py). A rank's queries meet its own keys
under the causal mask. Of any other rank's keys they need one half, or one half of the queries needs
all of them, without a mask; both are as many pairs. Keys are sent during attention that does not need
them, and gradients of keys are sent back the same way. In backward, the first half of the rank's own
heads hides the first keys, and the second half hides the last gradients.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, TRANSFER, Term
from stepgauge.spec.units import ceil_div

RING = "attention.ring."  # prefix of the names of its terms, which all belong to one operator
FP32_BYTES = 4  # sums of more than two parts are kept in fp32
# Keys and values are stacked for the message from tensors with other strides. That takes as long as a plain pass
# over so many times their bytes: 91 us for 21 M values in bf16 on an H200 (docs/log/2026-11-30-tensor-waits.md).
STACK_PASSES = 8.5


@dataclasses.dataclass(frozen=True)
class Ring:
    """Sizes of the ring on one rank.

    queries    values of the rank's queries
    keys       values of its keys and values together
    itemsize   bytes of a value
    key_heads  key heads of the rank
    """

    ranks: int
    queries: float
    keys: float
    itemsize: int
    key_heads: int

    @property
    def sum_bytes(self) -> int:
        """Bytes per value of the output while it is summed, and of the summed gradients."""
        return FP32_BYTES if self.ranks > 2 else self.itemsize

    def forward(self, attention: Term) -> Iterator[Term]:
        """Yields forward. `attention` covers the rank's own tokens."""
        q, kv, itemsize = self.queries, self.keys, self.itemsize
        yield self._pass("stack", kv * itemsize * STACK_PASSES)
        for meeting in range(self.ranks):
            yield attention
            if meeting < self.ranks - 1:
                yield self._sent("keys", kv * itemsize, attention)
            if meeting:  # scale the output so far, and add the new part by its share
                yield self._pass("merge", q * (2 * self.sum_bytes + 2 * FP32_BYTES + itemsize))
        if self.sum_bytes > itemsize:
            yield self._pass("cast_to_fp32", q * (itemsize + FP32_BYTES))
            yield self._pass("cast_result", q * (itemsize + FP32_BYTES))

    def backward(self, attention: Term) -> Iterator[Term]:
        """Yields backward. `attention` covers the rank's own tokens."""
        q, kv, itemsize, others = self.queries, self.keys, self.itemsize, self.ranks - 1
        first, second = self._halves(attention)
        sum_queries = self._pass("sum_queries", others * q * (2 * self.sum_bytes + itemsize))
        yield self._pass("stack", kv * itemsize * STACK_PASSES)
        yield from (*first, self._sent("keys", kv * itemsize, *first))
        for meeting in range(1, others + 1):
            yield attention
            if meeting < others:
                yield self._sent("keys", kv * itemsize, attention)
            yield self._pass("sum_keys", kv * self._bytes_per_summed_key(meeting))
            hidden_by = (attention,) if meeting < others else (*second, sum_queries)
            sent_bytes = kv * (itemsize if meeting == 1 else FP32_BYTES)
            yield self._sent("key_gradients", sent_bytes, *hidden_by)
        yield from (*second, sum_queries)
        yield self._pass("write_own", (q + kv) * (itemsize + self.sum_bytes))
        yield self._pass("add_own", kv * 3 * self.sum_bytes)
        if self.sum_bytes > itemsize:
            yield self._pass("cast_result", (q + kv) * (itemsize + FP32_BYTES))

    def _halves(self, attention: Term) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """Returns attention of the two halves of the rank's heads; the second may be empty.

        A key head stays together with all its query heads.
        """
        heads, *rest = attention.sizes
        first = heads * ceil_div(self.key_heads, 2) / self.key_heads
        parts = (dataclasses.replace(attention, sizes=(n, *rest)) for n in (first, heads - first))
        one, other = ((part,) if part.sizes[0] else () for part in parts)
        return one, other

    def _bytes_per_summed_key(self, meeting: int) -> int:
        """Returns the bytes moved per value of the key gradients that are sent on.

        A part is added to zeros (first meeting), to a sum that is cast to fp32 for it (second), or to
        a sum in fp32.
        """
        itemsize = self.itemsize
        if meeting == 1:
            return 4 * itemsize
        cast = FP32_BYTES + itemsize if meeting == 2 and itemsize < FP32_BYTES else 0
        return 2 * FP32_BYTES + itemsize + cast

    def _pass(self, name: str, nbytes: float) -> Term:
        return Term(f"{RING}{name}", TRAFFIC, (nbytes,))

    def _sent(self, name: str, nbytes: float, *hidden_by: Term) -> Term:
        return Term(f"{RING}{name}", TRANSFER, (nbytes,), axis="context", hidden_by=hidden_by)
