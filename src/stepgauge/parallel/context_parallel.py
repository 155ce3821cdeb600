"""Context parallel: each rank has some tokens of every sequence, and keys travel around a ring.

    context = ContextParallel(group, PartialAttention(forward, backward))
    o_BHTD = context.attend(q_BHTD, k_BKTD, v_BKTD, is_causal=True)

Everything in a network but attention works on each token alone: a module runs on its rank's tokens
as it is, with their positions, and the gradients of its weights are averaged over the group as
those of data parallel are.

Legend: B batch, H query heads, K key heads, T tokens of a rank, D head width.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.spec.plan.context import Meeting, chunks_of, half, plan_ring, positions_of


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
class ContextParallel:
    """The ranks of a group, each with its tokens of a sequence.

    communicates  False: each rank computes as much on its own keys alone, to see what sending costs

    Ranks' means over their tokens are weighed by how many count (CountedMean): targets of -100 lie
    on some ranks more than on others.
    """

    group: dist.ProcessGroup
    attention: PartialAttention
    communicates: bool = True
    _positions: dict[tuple[int, str], Tensor] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> int:
        return self.group.size()

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Positions of the rank's tokens in a sequence of that length, (length / N,). Raises
        ValueError for a length that 2N does not divide.
        """
        key = length, str(device)
        if key not in self._positions:
            found = positions_of(length, self.rank, self.ranks)
            self._positions[key] = torch.tensor(found, device=device)
        return self._positions[key]

    def piece(self, whole: Tensor, dim: int = 1) -> Tensor:
        """The rank's tokens of what has all of them along `dim`."""
        return whole.index_select(dim, self.positions(whole.shape[dim], whole.device))

    def whole(self, piece: Tensor, dim: int = 1) -> Tensor:
        """The inverse of `piece`. All ranks must call it."""
        gathered = [torch.empty_like(piece) for _ in range(self.ranks)]
        dist.all_gather(gathered, piece.contiguous(), group=self.group)
        chunks: list[Tensor] = [piece] * (2 * self.ranks)
        for rank, found in enumerate(gathered):
            first, second = chunks_of(rank, self.ranks)
            chunks[first], chunks[second] = found.chunk(2, dim)
        return torch.cat(chunks, dim)

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
        many tokens.

        Sends (N-1) · (k + v) bytes in forward, and in backward as many and N-1 times their
        gradients, which travel in fp32 where they are sums.
        """
        scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
        o: Tensor = _RingAttention.apply(q_BHTD, k_BKTD, v_BKTD, self, is_causal, scale)
        return o


class _RingAttention(torch.autograd.Function):
    """Saves q, k, v, o and the log-sum-exp over all keys: what attention in one process saves."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: ContextParallel, *how: Any
    ) -> Tensor:
        is_causal, scale = how
        o, lse = _ring_forward(q, torch.stack((k, v)), context, is_causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.context, ctx.is_causal, ctx.scale = context, is_causal, scale
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        dq, (dk, dv) = _ring_backward(
            grad_o, q, torch.stack((k, v)), o, lse, ctx.context, ctx.is_causal, ctx.scale
        )
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _ring_forward(
    q: Tensor, kv: Tensor, context: ContextParallel, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """o in q's type, and lse; sums of parts are kept in fp32 or wider."""
    meetings = plan_ring(context.rank, context.ranks, is_causal=is_causal)
    wide = torch.promote_types(q.dtype, torch.float32) if len(meetings) > 1 else q.dtype
    o, lse = q, q  # until the first meeting, of all queries with their own rank's keys
    for meeting, (k, v) in zip(meetings, _around(kv, context), strict=True):
        rows, columns = _halves(meeting, q, k)
        keys = (x[..., columns, :] for x in (k, v))
        part_o, part_lse = context.attention.forward(
            q[..., rows, :], *keys, meeting.is_causal, scale
        )
        if meeting.source == context.rank:
            o, lse = part_o.to(wide), part_lse
        else:
            _add_part(o[..., rows, :], lse[..., rows], part_o, part_lse)
    return o.to(q.dtype), lse


def _add_part(o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor) -> None:
    """Attention over more keys, in place: each part counts by its share of the sum of exponents."""
    total = torch.logaddexp(lse, part_lse)
    o.mul_((lse - total).exp()[..., None]).addcmul_(part_o, (part_lse - total).exp()[..., None])
    lse.copy_(total)


def _ring_backward(
    grad_o: Tensor,
    q: Tensor,
    kv: Tensor,
    o: Tensor,
    lse: Tensor,
    context: ContextParallel,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """dq, and dk with dv. A rank keeps what its own queries say about its keys; what the others say
    travels behind these, and home. Sums of more than two parts are in fp32 or wider: that of two is
    rounded once in any case.
    """
    meetings = plan_ring(context.rank, context.ranks, is_causal=is_causal)
    wide = torch.promote_types(q.dtype, torch.float32) if len(meetings) > 2 else q.dtype
    dq = own_dkv = q  # until the first meeting, of all queries with their own rank's keys
    returning = None
    for meeting, (k, v) in zip(meetings, _around(kv, context), strict=True):
        rows, columns = _halves(meeting, q, k)
        queries = [x[..., rows, :] for x in (grad_o, q)]
        keys = [x[..., columns, :] for x in (k, v)]
        totals = o[..., rows, :], lse[..., rows].contiguous()
        dq_part, *parts = context.attention.backward(
            *queries, *keys, *totals, meeting.is_causal, scale
        )
        if meeting.source == context.rank:
            dq, own_dkv = dq_part.to(wide), torch.stack(parts)
            continue
        dq[..., rows, :] += dq_part
        dkv = torch.zeros_like(kv) if returning is None else returning.wait().to(wide)
        for total, part in zip(dkv, parts, strict=True):
            total[..., columns, :] += part
        returning = _Arriving(dkv, context)
    return dq.to(q.dtype), own_dkv if returning is None else returning.wait().add_(own_dkv)


def _around(kv: Tensor, context: ContextParallel) -> Iterator[Tensor]:
    """The keys and values of each rank, the own ones first: the next travel while the caller
    computes.
    """
    for _ in range(context.ranks - 1):
        arriving = _Arriving(kv, context)
        yield kv
        kv = arriving.wait()
    yield kv


def _halves(meeting: Meeting, q: Tensor, k: Tensor) -> tuple[slice, slice]:
    return half(meeting.queries, q.shape[-2]), half(meeting.keys, k.shape[-2])


class _Arriving:
    """A tensor on its way to the next rank, and the one that comes from the rank before."""

    def __init__(self, tensor: Tensor, context: ContextParallel):
        self._sent = self._received = tensor.contiguous()
        self._works: list[dist.Work] = []
        if not context.communicates:
            return
        self._received = torch.empty_like(self._sent)
        following, previous = (
            dist.get_global_rank(context.group, (context.rank + step) % context.ranks)
            for step in (1, -1)
        )
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, following, context.group),
                dist.P2POp(dist.irecv, self._received, previous, context.group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received
