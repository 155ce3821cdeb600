"""Context-parallel attention by exchange of heads (Ulysses), as head_exchange.py of parallel/ runs it.

Each rank computes attention over all tokens for its share of the heads, in groups. Attention waits
for queries, keys and values of the first group only. Those of the next group are sent during the
attention of this one, and its output during the attention of the next. Backward does the same in
reverse order, with as many bytes.

What other ranks get is packed into a message and copied into an outbox, as on GPUs of one machine. What
has arrived is copied to where attention, or the layer after it, reads it, together with the rank's own.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, TRANSFER, Term
from stepgauge.spec.plan.context import num_head_groups


@dataclasses.dataclass(frozen=True)
class HeadExchanges:
    """Sizes of the exchange on one rank.

    queries    values of the rank's queries
    keys       values of its keys and values together
    itemsize   bytes of a value
    key_heads  key heads of all ranks
    """

    ranks: int
    queries: float
    keys: float
    itemsize: int
    key_heads: int

    def terms(self, attention: Term) -> Iterator[Term]:
        """Yields one direction. `attention` covers the rank's heads over all tokens."""
        groups = num_head_groups(self.key_heads, self.ranks)
        heads, *rest = attention.sizes
        group_attention = dataclasses.replace(attention, sizes=(heads / groups, *rest))
        qkv, output = (self.queries + self.keys) / groups, self.queries / groups
        others = (self.ranks - 1) / self.ranks
        sent, returned = self.queries + self.keys, self.queries
        yield self._copy("pack", 2 * others * sent)
        yield self._copy("unpack", sent)
        yield self._exchange("exchange_qkv", qkv)
        for group in range(groups):
            yield group_attention
            if group < groups - 1:
                yield self._exchange("exchange_qkv", qkv, group_attention)
                yield self._exchange("exchange_output", output, group_attention)
        yield self._copy("pack_output", 2 * others * returned)
        yield self._exchange("exchange_output", output)
        yield self._copy("unpack_output", returned)

    def _copy(self, name: str, values: float) -> Term:
        return Term(f"attention.{name}", TRAFFIC, (2 * values * self.itemsize,))

    def _exchange(self, name: str, values: float, *hidden_by: Term) -> Term:
        nbytes = values * self.itemsize * (self.ranks - 1) / self.ranks
        return Term(f"attention.{name}", TRANSFER, (nbytes,), axis="context",
                    hidden_by=hidden_by, copied_as="all_to_all")  # fmt: skip
