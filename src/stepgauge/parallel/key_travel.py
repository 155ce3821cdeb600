"""How the keys of each rank of a sequence get to the others' queries, and their gradients home.

    with travel_of(kv, ...) as travel:
        for kv in travel.keys(): ...       # of the other ranks, in the order of plan_ring
        travel.give(source, (dk, dv), columns)
        travel.home()                      # what the others say about this rank's keys

By messages around a ring, which need the multiprocessors that attention has; between ranks of one
machine by copy engines, straight to each rank that reads. kv is (2, B, K, T, D).
"""

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.exchange import Inbox, Outbox, exchange_of


class Travel(Protocol):
    def keys(self) -> Iterator[Tensor]:
        """Those of the other ranks, on their way from the start on."""

    def give(self, source: int, parts: Sequence[Tensor], columns: slice) -> None:
        """Gradients of some of the keys of `source`, once for each rank in the order of `keys`."""

    def home(self) -> list[Tensor]:
        """What the others gave this rank, to be added up; after the last `give`."""


@contextlib.contextmanager
def travel_of(kv: Tensor, group: dist.ProcessGroup, *, copies: bool) -> Iterator[Travel]:
    """One pass over the keys of the group. All ranks must make it."""
    if copies:
        with Copies(kv, group) as travel:
            yield travel
        return
    messages = Messages(kv, group)
    try:
        yield messages
    except Exception:  # which all ranks have, and may go on from
        messages.finish()
        raise


class Staying:
    """Nothing is sent: the own keys stand for all others."""

    def __init__(self, kv: Tensor, ranks: int):
        self._kv, self._ranks = kv, ranks

    def keys(self) -> Iterator[Tensor]:
        yield from [self._kv] * (self._ranks - 1)

    def give(self, source: int, parts: Sequence[Tensor], columns: slice) -> None: ...

    def home(self) -> list[Tensor]:
        return []


class Messages:
    """Around a ring. Sums of gradients travel behind the keys, and in fp32 or wider once they are of
    two parts.
    """

    def __init__(self, kv: Tensor, group: dist.ProcessGroup):
        self._kv, self._group = kv, group
        self._arriving = _Arriving(kv, group)
        self._returning: _Arriving | None = None

    def keys(self) -> Iterator[Tensor]:
        for step in range(1, self._group.size()):
            kv = self._arriving.wait()
            if step < self._group.size() - 1:
                self._arriving = _Arriving(kv, self._group)
            yield kv

    def give(self, source: int, parts: Sequence[Tensor], columns: slice) -> None:
        if self._returning is None:
            sums = torch.zeros_like(self._kv)
        else:
            wide = torch.promote_types(self._kv.dtype, torch.float32)
            sums = self._returning.wait().to(wide)
        for total, part in zip(sums, parts, strict=True):
            total[..., columns, :] += part
        self._returning = _Arriving(sums, self._group)

    def home(self) -> list[Tensor]:
        assert self._returning is not None, "gradients were given"
        return [self._returning.wait()]

    def finish(self) -> None:
        """Waits for what is on its way, which the next message would else be taken for."""
        for each in (self._arriving, self._returning):
            if each is not None:
                each.wait()


class _Arriving:
    """A tensor on its way to the next rank, and the one that comes from the rank before."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup):
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(self._sent)
        following, previous = (
            dist.get_global_rank(group, (group.rank() + step) % group.size()) for step in (1, -1)
        )
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, following, group),
                dist.P2POp(dist.irecv, self._received, previous, group),
            ]
        )

    def wait(self) -> Tensor:
        while self._works:
            self._works.pop().wait()
        return self._received


class Copies:
    """By copy engines: keys are pushed into every other rank's inbox, gradients fetched from the
    outboxes of those that have them. `exchange.register` must know the group.
    """

    def __init__(self, kv: Tensor, group: dist.ProcessGroup):
        self._shape = kv.shape
        self._rows = kv.contiguous().view(1, -1, kv.shape[-1])
        nbytes = group.size() * kv.nbytes
        self._exchange = exchange_of(group.group_name, kv.device, nbytes)
        self._turn = contextlib.ExitStack()
        self._outbox: Outbox | None = None
        self._given = 0

    def __enter__(self) -> Self:
        self._turn.enter_context(self._exchange.sides("send", "tell", "receive"))
        self._inbox = Inbox(self._exchange, self._rows)
        self._inbox.send(to_own=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._turn.__exit__(kind, error, trace)

    def keys(self) -> Iterator[Tensor]:
        for rank in self._exchange.senders:
            yield self._inbox.arrived(rank).view(self._shape)

    def give(self, source: int, parts: Sequence[Tensor], columns: slice) -> None:
        exchange, (_, length, width) = self._exchange, self._rows.shape
        if self._outbox is None:
            whole = 1, exchange.ranks * length, width
            self._outbox = Outbox(exchange, whole, self._rows)
        for place, part in zip(self._outbox.piece(source).view(self._shape), parts, strict=True):
            if part.shape != place.shape:
                place.zero_()
            place[..., columns, :] = part
        self._outbox.tell(source)
        self._given += 1
        if self._given == exchange.ranks - 1:
            self._outbox.receive()

    def home(self) -> list[Tensor]:
        assert self._outbox is not None, "gradients were given"
        self._exchange.order("receive", "")
        parts = self._outbox.parts_NBQD
        return [parts[rank].view(self._shape) for rank in self._exchange.senders]
