"""Context parallel by a ring: each rank has some tokens of every sequence, and the keys of all travel
around.

    context = RingAttention(group, PartialAttention(forward, backward))
    o_BHTD = context.attend(q_BHTD, k_BKTD, v_BKTD, is_causal=True)

Legend: B batch, H query heads, K key heads, T tokens of a rank, D head width.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.parallel.autograd.first_derivatives import without_second_derivative
from stepgauge.parallel.autograd.operators import define_operator
from stepgauge.parallel.context_parallel.key_travel import Messages, Staying, Travel
from stepgauge.parallel.context_parallel.split_sequences import SplitSequences
from stepgauge.spec.plan.context import RingStep, chunk_slice, plan_ring, ring_positions
from stepgauge.spec.units import ceil_div


@dataclasses.dataclass(frozen=True)
class PartialAttention:
    """Attention over some of the keys, of which a whole can be put together.

    forward   (q, k, v, is_causal, scale) -> o, and the log-sum-exp (B, H, T) of the scores in
              natural logarithms
    backward  (grad_o, q, k, v, o, lse, is_causal, scale) -> dq, dk, dv, where o and lse may be
              those of more keys than these
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclasses.dataclass
class RingAttention(SplitSequences):
    """The ranks of a group, each with two chunks of a sequence: the keys of all travel to all."""

    attention: PartialAttention

    def tokens(self, length: int, rank: int) -> Sequence[int]:
        """Raises ValueError for a length that 2N does not divide."""
        return ring_positions(length, rank, self.ranks)

    @contextlib.contextmanager
    def travel(self, k: Tensor, v: Tensor) -> Iterator[Travel]:
        """Of the rank's keys and values, to the other ranks. All ranks must begin it."""
        kv = torch.stack((k, v)) if self.ranks > 1 else k[None]
        if self.ranks == 1 or not self.communicates:
            yield Staying(kv, self.ranks)
            return
        messages = Messages(kv, self.group)
        try:
            yield messages
        except Exception:  # which all ranks have, and may go on from
            messages.finish()
            raise

    @torch.compiler.disable
    def attend(
        self,
        q_BHTD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        *,
        is_causal: bool = True,
        scale: float | None = None,
    ) -> Tensor:
        """o_BHTD of the rank's queries over the keys of all ranks. Every rank must call it, with as
        many tokens. Raises ValueError for an odd number of them with is_causal, which cuts the two
        chunks of each rank apart.

        Sends (N-1) · (k + v) bytes in forward, and in backward as many and as much of their
        gradients, whose sums travel in fp32.
        """
        for tokens in (q_BHTD.shape[-2], k_BKTD.shape[-2]) if is_causal and self.ranks > 1 else ():
            if tokens % 2:
                raise ValueError(
                    f"there are {tokens} tokens on this rank; causal context parallel takes two equal "
                    f"chunks of a sequence on each: choose an even number"
                )
        scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
        o: Tensor = _Ring.apply(q_BHTD, k_BKTD, v_BKTD, self, is_causal, scale)
        return o


class _Ring(torch.autograd.Function):
    """Saves q, k, v, o and the log-sum-exp over all keys: what attention in one process saves."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: RingAttention, *how: Any
    ) -> Tensor:
        _CONTEXTS[id(context)] = context
        o, lse = ring_attention(q, k, v, id(context), *how)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.context, (ctx.is_causal, ctx.scale) = context, how
        return o

    @staticmethod
    @without_second_derivative("ring attention, unlike cp ulysses,")
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        how = ctx.context, ctx.is_causal, ctx.scale
        with ctx.context.travel(k, v) as travel:
            gradients = RingBackward(grad_o, q, k, v, o, lse, *how).gradients(travel)
        return *gradients, None, None, None


def _ring_forward(
    q: Tensor, k: Tensor, v: Tensor, context_id: int, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """o in q's type, and lse; sums of more than two parts are kept in fp32 or wider."""
    context = _CONTEXTS[context_id]
    attend = context.attention.forward
    own, *others = plan_ring(context.rank, context.ranks, is_causal=is_causal)
    with context.travel(k, v) as travel:
        o, lse = attend(q, k, v, own.is_causal, scale)
        if len(others) > 1:
            o = o.to(torch.promote_types(q.dtype, torch.float32))
        for meeting, kv in zip(others, travel.keys(), strict=True):
            rows, columns = _halves(meeting, q, k)
            keys = (x[..., columns, :] for x in kv)
            part = attend(q[..., rows, :], *keys, meeting.is_causal, scale)
            _add_part(o[..., rows, :], lse[..., rows], *part)
    return o.to(q.dtype), lse


_CONTEXTS: MutableMapping[int, RingAttention] = weakref.WeakValueDictionary()  # by id
# Selective checkpointing keeps what it gives: backward neither attends nor sends keys again.
ring_attention = define_operator(
    "ring_attention",
    "(Tensor q, Tensor k, Tensor v, int context_id, bool is_causal, float scale)"
    " -> (Tensor o, Tensor lse)",
    _ring_forward,
)


def _add_part(o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor) -> None:
    """Attention over more keys, in place: each part counts by its share of the sum of exponents, in
    the type of lse.
    """
    total = torch.logaddexp(lse, part_lse)
    share, part_share = ((x - total).exp()[..., None] for x in (lse, part_lse))
    torch.addcmul(o * share, part_o, part_share, out=o)
    lse.copy_(total)


@dataclasses.dataclass(frozen=True)
class RingBackward:
    """Gradients of q, and of the rank's keys: the own queries' share, and what the others give.

    The rank meets its own keys with the first half of the heads while the others' keys arrive, and
    with the second half while gradients go home. Sums of more than two parts are in fp32 or wider;
    that of two is rounded once in any case.
    """

    grad_o: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    context: RingAttention
    is_causal: bool
    scale: float

    def gradients(self, travel: Travel) -> list[Tensor]:
        context, given = self.context, (self.q, self.k, self.v)
        own, *others = plan_ring(context.rank, context.ranks, is_causal=self.is_causal)
        wide = torch.promote_types(self.q.dtype, torch.float32) if len(others) > 1 else None
        found = [torch.empty_like(x, dtype=wide) for x in given]
        first, second = self._halves_of_heads() if others else (slice(None), slice(0))
        self._meet_own(own, first, found)
        shares = []
        for meeting, kv in zip(others, travel.keys(), strict=True):
            rows, columns = _halves(meeting, self.q, self.k)
            dq, *parts = self._meet(meeting, rows, *(x[..., columns, :] for x in kv))
            travel.give(meeting.source, parts, columns)
            shares.append((rows, dq))
        self._meet_own(own, second, found)
        for rows, dq in shares:
            found[0][..., rows, :] += dq
        for dkv in travel.home() if others else ():
            for total, part in zip(found[1:], dkv, strict=True):
                total += part
        return [x.to(like.dtype) for x, like in zip(found, given, strict=True)]

    def _halves_of_heads(self) -> tuple[slice, slice]:
        """Of the key heads."""
        middle = ceil_div(self.k.shape[1], 2)
        return slice(middle), slice(middle, None)

    def _meet_own(self, meeting: RingStep, heads: slice, found: Sequence[Tensor]) -> None:
        """Writes the gradients of these key heads and of the query heads that read them."""
        begin, end, _ = heads.indices(self.k.shape[1])
        if begin == end:
            return
        group = self.q.shape[1] // self.k.shape[1]
        queries = slice(begin * group, end * group)
        keys = self.k[:, heads], self.v[:, heads]
        parts = self._meet(meeting, slice(None), *keys, queries)
        for total, part, own in zip(found, parts, (queries, heads, heads), strict=True):
            total[:, own] = part

    def _meet(
        self, meeting: RingStep, rows: slice, k: Tensor, v: Tensor, heads: slice = slice(None)
    ) -> tuple[Tensor, ...]:
        grad_o, q, o = (x[:, heads, rows] for x in (self.grad_o, self.q, self.o))
        lse = self.lse[:, heads, rows].contiguous()
        return self.context.attention.backward(
            grad_o, q, k, v, o, lse, meeting.is_causal, self.scale
        )


def _halves(meeting: RingStep, q: Tensor, k: Tensor) -> tuple[slice, slice]:
    return chunk_slice(meeting.queries, q.shape[-2]), chunk_slice(meeting.keys, k.shape[-2])
