"""Pieces of activations between ranks of one machine, by copies that run beside products.

Two kinds of boxes lie in memory that peers reach (parallel.pipeline.peer_memory): an inbox x_BTD,
into whose rows every other rank copies its piece, and an outbox of a piece x_BQD for each other
rank, from which that rank copies it out. Copy engines move the bytes, and no multiprocessor waits.

Why nothing is read too early. A sender sets a flag after its copy, on the same stream; it sets that
of an outbox when the product that wrote it is done. The reader's stream waits for the flag.

Why nothing is overwritten too early, without a word from the reader. Each kind of box is used in
turns that all ranks count alike, turn k has box k mod 2, and in every turn each rank hears from
each other. Before a rank's box of turn k is written, this rank has heard from that one in turn
k - 1. That message was sent after the other rank's stream had finished turn k - 2, the last that
read this box: `sides` makes every stream begin after what the calling stream has done, and makes
the calling stream wait for all of them at the end. The same holds for flags, so each box has its
own: a flag that is still waited for is not set again.

Why nobody waits for ever. A rank hands its streams everything that it sends in a turn before the
first wait for what it receives in it, so that even streams that the driver serves one behind the
other (or a CPU, where the host does each at once) get to the sending.

What is sent must stay in memory until the copy is done, and what is received must not be memory
that is still in use: both hold because the calling stream waits for the others at the end, and they
for it at the beginning. That is also all that a compiler knows which reuses memory by itself.

Legend: B batch, T sequence, D width, N ranks, Q = T/N.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.pipeline.peer_memory import ALIGNMENT, PeerMemory, peer_memory

BOXES = 2  # of each kind: one is read while the next is written
_INBOX, _OUTBOX = 0, 1


class Exchange:
    """The boxes of a group, of so many bytes each. All ranks must make it, and use it, alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, box_bytes: int):
        self.rank, self.ranks = group.rank(), group.size()
        self.device, self.box_bytes = device, box_bytes
        flags = 2 * BOXES * self.ranks
        self.memory: PeerMemory = peer_memory(2 * BOXES, box_bytes, flags, device, group)
        self._turns = [0, 0]
        self._streams: dict[str, Any] = {}

    def turn(self, kind: int) -> tuple[int, int]:
        """The number of the next turn of a kind of boxes, and its box."""
        self._turns[kind] += 1
        return self._turns[kind], BOXES * kind + self._turns[kind] % BOXES

    def view(self, rank: int, box: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        nbytes = shape.numel() * dtype.itemsize
        return self.memory.box(rank, box)[:nbytes].view(dtype).view(shape)

    def tell(self, rank: int, box: int, turn: int) -> None:
        self.memory.tell(rank, box * self.ranks + self.rank, turn)

    def wait(self, rank: int, box: int, turn: int) -> None:
        self.memory.wait(box * self.ranks + rank, turn)

    @contextlib.contextmanager
    def sides(self) -> Iterator[None]:
        """Around a use of boxes: other streams begin after the calling one and end before it."""
        if self.device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(self.device)
        if not self._streams:
            names = ("send", "tell", "receive", "compute")
            self._streams = {name: torch.cuda.Stream(self.device) for name in names}
            self._done = torch.cuda.Event()
        current.wait_event(self._done)  # of the last use, on whatever stream it was
        for stream in self._streams.values():
            stream.wait_stream(current)
        yield
        for stream in self._streams.values():
            current.wait_stream(stream)
        self._done.record(current)

    def on(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A stream of `sides`; "" is the calling one."""
        if self.device.type != "cuda" or not name:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._streams[name])

    def order(self, before: str, after: str) -> None:
        """A stream waits for what another has been given; "" is the calling one."""
        if self.device.type == "cuda":
            current = torch.cuda.current_stream(self.device)
            self._streams.get(after, current).wait_stream(self._streams.get(before, current))

    @property
    def receivers(self) -> list[int]:
        """The other ranks, in the order in which this one sends to them: each receives from one at
        a time. The reverse is the order in which it receives.
        """
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    @property
    def senders(self) -> list[int]:
        return self.receivers[::-1]


class Inbox:
    """One turn: x_BTD of which this rank has x_BQD."""

    def __init__(self, exchange: Exchange, x_BQD: Tensor):
        self._exchange, self._piece = exchange, x_BQD.contiguous()
        batch, length, width = x_BQD.shape
        self._shape = torch.Size((batch, exchange.ranks * length, width))
        self._turn, self._box = exchange.turn(_INBOX)
        self.whole_BTD = self._of(exchange.rank)

    def _of(self, rank: int) -> Tensor:
        return self._exchange.view(rank, self._box, self._shape, self._piece.dtype)

    def send(self, *, to_own: bool) -> None:
        """This rank's piece to all others, and to its own box where `whole_BTD` is wanted."""
        exchange = self._exchange
        with exchange.on("send"):
            for peer in exchange.receivers:
                self._copy(self._of(peer))
                exchange.tell(peer, self._box, self._turn)
            if to_own:
                self._copy(self.whole_BTD)

    def _copy(self, target_BTD: Tensor) -> None:
        # A sequence at a time: rows that are contiguous go by a copy engine.
        rows_BQD = rows_of(target_BTD, self._exchange.rank, self._exchange.ranks)
        for target, piece in zip(rows_BQD.unbind(), self._piece.unbind(), strict=True):
            target.copy_(piece)

    def arrived(self, rank: int) -> Tensor:
        """Another rank's piece, for which the current stream waits."""
        self._exchange.wait(rank, self._box, self._turn)
        return rows_of(self.whole_BTD, rank, self._exchange.ranks)

    def whole(self) -> Tensor:
        """All pieces, sent with `to_own`, for which the calling stream waits."""
        for rank in self._exchange.senders:
            self.arrived(rank)
        self._exchange.order("send", "")
        return self.whole_BTD


class Outbox:
    """One turn: a piece for each other rank, and in `parts_NBQD` what all have for this one."""

    def __init__(self, exchange: Exchange, shape_NBQD: torch.Size, like: Tensor):
        self._exchange = exchange
        self._turn, self._box = exchange.turn(_OUTBOX)
        self._shape, self._dtype = shape_NBQD, like.dtype
        self.parts_NBQD = like.new_empty(shape_NBQD)

    def piece(self, rank: int) -> Tensor:
        """Where the piece for another rank is to be written."""
        return self._of(self._exchange.rank)[rank]

    def _of(self, rank: int) -> Tensor:
        return self._exchange.view(rank, self._box, self._shape, self._dtype)

    def tell(self, rank: int, stream: str) -> None:
        """That the piece for a rank is there once the stream has done what it was given."""
        self._exchange.order(stream, "tell")
        with self._exchange.on("tell"):
            self._exchange.tell(rank, self._box, self._turn)

    def receive(self) -> None:
        """Copies out what the others have for this rank, once they have said so."""
        exchange = self._exchange
        with exchange.on("receive"):
            for rank in exchange.senders:
                exchange.wait(rank, self._box, self._turn)
                self.parts_NBQD[rank].copy_(self._of(rank)[exchange.rank])


def rows_of(x_BTD: Tensor, rank: int, ranks: int) -> Tensor:
    """The piece x_BQD of a rank."""
    length = x_BTD.shape[1] // ranks
    return x_BTD.narrow(1, rank * length, length)


_groups: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()
_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, Exchange] = weakref.WeakKeyDictionary()


def register(group: dist.ProcessGroup) -> None:
    """Lets `exchange_of` find the group by its name, which is all that a compiled graph holds."""
    _groups[group.group_name] = group


def num_ranks(group_name: str) -> int:
    return _groups[group_name].size()


def exchange_of(group_name: str, device: torch.device, nbytes: int) -> Exchange:
    """The group's boxes, of at least so many bytes. Where they are too small all ranks make larger
    ones; the old ones are freed once nobody uses them.
    """
    group = _groups[group_name]
    exchange = _exchanges.get(group)
    if exchange is None or exchange.box_bytes < nbytes or exchange.device != device:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # and all ranks wait for each other in the constructor
        exchange = Exchange(group, device, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        _exchanges[group] = exchange
    return exchange
