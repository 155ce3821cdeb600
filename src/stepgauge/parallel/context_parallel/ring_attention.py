"""Context parallel by a ring: each rank has some tokens of every sequence, and keys and values are
sent around the ring.

    context = RingAttention(group, PartialAttention(forward, backward))
    o_BHTD = context.attend(q_BHTD, k_BKTD, v_BKTD, is_causal=True)

Legend: B batch, H query heads, K key heads, T tokens of a rank, D head width.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.autograd.first_derivatives import without_second_derivative
from stepgauge.parallel.autograd.operators import define_operator
from stepgauge.parallel.context_parallel.ring_transport import NoTransport, RingMessages, Transport
from stepgauge.parallel.context_parallel.split_sequences import SplitSequences
from stepgauge.spec.plan.context import RingStep, chunk_slice, plan_ring, ring_positions
from stepgauge.spec.units import ceil_div


@dataclasses.dataclass(frozen=True)
class PartialAttention:
    """Attention to some of the keys. The results for all keys can be combined from those for parts.

    forward   (q, k, v, is_causal, scale) -> o, lse: the output, and the log-sum-exp (B, H, T) of the
              scores in natural logarithms
    backward  (grad_o, q, k, v, o, lse, is_causal, scale) -> dq, dk, dv, where o and lse may include
              more keys than k
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclasses.dataclass
class RingAttention(SplitSequences):
    """A group of ranks, each with two chunks of every sequence (spec/plan/context.py)."""

    attention: PartialAttention

    def __post_init__(self) -> None:
        self.number = _number_of(self.group, self.attention)

    def tokens(self, length: int, rank: int) -> Sequence[int]:
        """Raises ValueError if the length is not a multiple of 2N."""
        return ring_positions(length, rank, self.ranks)

    @contextlib.contextmanager
    def transport(self, k: Tensor, v: Tensor) -> Iterator[Transport]:
        """Starts to send the rank's keys and values to the other ranks. All ranks must call it."""
        kv = torch.stack((k, v)) if self.ranks > 1 else k[None]
        if self.ranks == 1 or not self.communicates:
            yield NoTransport(kv, self.ranks)
            return
        messages = RingMessages(kv, self.group)
        try:
            yield messages
        except Exception:  # an error that all ranks have, and that they may handle
            messages.finish()
            raise

    def attend(
        self,
        q_BHTD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        *,
        is_causal: bool = True,
        scale: float | None = None,
    ) -> Tensor:
        """Returns o_BHTD, the attention of this rank's queries to the keys of all ranks. Every rank
        must call it with the same number of tokens.

        Sends (N-1) · (k + v) bytes in forward. Backward sends these again and as many gradients,
        whose sums travel in fp32.

        Raises ValueError for an odd number of tokens if is_causal, because it treats the two chunks
        of a rank separately.
        """
        for tokens in (q_BHTD.shape[-2], k_BKTD.shape[-2]) if is_causal and self.ranks > 1 else ():
            if tokens % 2:
                raise ValueError(
                    f"there are {tokens} tokens on this rank; causal context parallel needs two equal "
                    f"chunks of a sequence on each rank: choose an even number"
                )
        scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
        settings = self.number, self.communicates, is_causal, scale
        o: Tensor = _Ring.apply(q_BHTD, k_BKTD, v_BKTD, *settings)
        return o


# The operators below take no objects, but the index of a group and its attention in this list. Rings
# with the same ones share it, because torch.compile compiles each number separately.
_RINGS: list[tuple[weakref.ref[dist.ProcessGroup], PartialAttention]] = []


def _number_of(group: dist.ProcessGroup, attention: PartialAttention) -> int:
    ring = weakref.ref(group), attention  # torch owns the group until it is destroyed
    if ring not in _RINGS:
        _RINGS.append(ring)
    return _RINGS.index(ring)


def _context_of(number: int, communicates: bool) -> RingAttention:
    group_ref, attention = _RINGS[number]
    group = group_ref()
    assert group is not None, "the process group was destroyed before backward"
    return RingAttention(group, attention, communicates=communicates)


class _Ring(torch.autograd.Function):
    """Saves what attention in one process saves: q, k, v, o and the log-sum-exp over all keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
        o, lse = ring_attention(q, k, v, *settings)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.settings = settings
        return o

    @staticmethod
    @without_second_derivative("ring attention, unlike cp ulysses,")
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        dqkv = ring_attention_backward(grad_o, *ctx.saved_tensors, *ctx.settings)
        return *dqkv, *(None for _ in ctx.settings)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    number: int,
    communicates: bool,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns o in the dtype of q, and lse. Sums of more than two parts are kept in fp32 or wider."""
    context = _context_of(number, communicates)
    attend = context.attention.forward
    own, *others = plan_ring(context.rank, context.ranks, is_causal=is_causal)
    with context.transport(k, v) as transport:
        o, lse = attend(q, k, v, own.is_causal, scale)
        if len(others) > 1:
            o = o.to(torch.promote_types(q.dtype, torch.float32))
        for step, kv in zip(others, transport.keys(), strict=True):
            rows, columns = _slices(step, q, k)
            keys = (x[..., columns, :] for x in kv)
            part = attend(q[..., rows, :], *keys, step.is_causal, scale)
            _add_part(o[..., rows, :], lse[..., rows], *part)
    return _in_layout_of(q, o), lse.contiguous()


def _backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    number: int,
    communicates: bool,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Returns dq, dk and dv."""
    context = _context_of(number, communicates)
    ring = RingBackward(grad_o, q, k, v, o, lse, context, is_causal, scale)
    with context.transport(k, v) as transport:
        gradients = ring.gradients(transport)
    return tuple(_in_layout_of(x, dx) for x, dx in zip((q, k, v), gradients, strict=True))


def _in_layout_of(x: Tensor, result: Tensor) -> Tensor:
    """Returns the result with the dtype and strides that the compiler expects: those of an empty
    tensor like x.
    """
    result = result.to(x.dtype)
    if result.stride() == torch.empty_like(x, device="meta").stride():
        return result
    return torch.empty_like(x).copy_(result)


def _fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q), lse


def _fake_backward(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# Operators, so that compiled blocks contain them and selective checkpointing can keep the results of
# the first: backward then neither computes attention nor sends keys again.
ring_attention = define_operator(
    "ring_attention",
    "(Tensor q, Tensor k, Tensor v, int number, bool communicates, bool is_causal, float scale)"
    " -> (Tensor o, Tensor lse)",
    _forward,
    _fake_forward,
)
ring_attention_backward = define_operator(
    "ring_attention_backward",
    "(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, int number,"
    " bool communicates, bool is_causal, float scale) -> (Tensor dq, Tensor dk, Tensor dv)",
    _backward,
    _fake_backward,
)


def _add_part(o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor) -> None:
    """Adds attention to more keys to o and lse, in place. Each part is weighted by its share of the sum
    of exponentials, in the dtype of lse.
    """
    total = torch.logaddexp(lse, part_lse)
    weight, part_weight = ((x - total).exp()[..., None] for x in (lse, part_lse))
    torch.addcmul(o * weight, part_o, part_weight, out=o)
    lse.copy_(total)


@dataclasses.dataclass(frozen=True)
class RingBackward:
    """Computes the gradients of q, and of this rank's keys and values from the queries of all ranks.

    For the rank's own keys, the first half of the heads is computed while the others' keys arrive,
    and the second half while gradients travel back. Sums of more than two parts are in fp32 or
    wider; a sum of two is rounded once in any case.
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

    def gradients(self, transport: Transport) -> list[Tensor]:
        """Returns dq, dk and dv."""
        context, inputs = self.context, (self.q, self.k, self.v)
        own, *others = plan_ring(context.rank, context.ranks, is_causal=self.is_causal)
        wide = torch.promote_types(self.q.dtype, torch.float32) if len(others) > 1 else None
        sums = [torch.empty_like(x, dtype=wide) for x in inputs]
        middle = ceil_div(self.k.shape[1], 2)
        first, second = (slice(middle), slice(middle, None)) if others else (slice(None), slice(0))
        self._write_own(own, first, sums)
        dq_parts = []
        for step, kv in zip(others, transport.keys(), strict=True):
            rows, columns = _slices(step, self.q, self.k)
            dq, *dkv = self._run_step(step, rows, *(x[..., columns, :] for x in kv))
            transport.add_gradients(step.source, dkv, columns)
            dq_parts.append((rows, dq))
        self._write_own(own, second, sums)
        for rows, dq in dq_parts:
            sums[0][..., rows, :] += dq
        for received in transport.own_gradients() if others else ():
            for total, part in zip(sums[1:], received, strict=True):
                total += part
        return [total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)]

    def _write_own(self, step: RingStep, key_heads: slice, sums: Sequence[Tensor]) -> None:
        """Writes the gradients from the step with the rank's own keys, for some key heads and the
        query heads that read them.
        """
        begin, end, _ = key_heads.indices(self.k.shape[1])
        if begin == end:
            return
        group = self.q.shape[1] // self.k.shape[1]
        query_heads = slice(begin * group, end * group)
        keys = self.k[:, key_heads], self.v[:, key_heads]
        parts = self._run_step(step, slice(None), *keys, query_heads)
        for total, part, heads in zip(
            sums, parts, (query_heads, key_heads, key_heads), strict=True
        ):
            total[:, heads] = part

    def _run_step(
        self, step: RingStep, rows: slice, k: Tensor, v: Tensor, heads: slice = slice(None)
    ) -> tuple[Tensor, ...]:
        """Returns dq, dk and dv of one step, for these rows and heads of the queries."""
        grad_o, q, o = (x[:, heads, rows] for x in (self.grad_o, self.q, self.o))
        lse = self.lse[:, heads, rows].contiguous()
        return self.context.attention.backward(grad_o, q, k, v, o, lse, step.is_causal, self.scale)


def _slices(step: RingStep, q: Tensor, k: Tensor) -> tuple[slice, slice]:
    """Returns the slices of queries and of keys that take part in a step."""
    return chunk_slice(step.queries, q.shape[-2]), chunk_slice(step.keys, k.shape[-2])
