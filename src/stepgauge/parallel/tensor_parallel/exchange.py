"""Pieces of activations between ranks of one machine, by copies that run beside products.

Two kinds of boxes lie in memory that peers reach (peer_memory.py): an inbox x_BTD, into whose rows
every other rank copies its piece, and an outbox of a piece x_BQD for each other rank, from which
that rank copies it out. Copy engines move the bytes, and no multiprocessor waits.

Why nothing is read too early. A sender sets a flag after its copy, on the same stream; it sets that
of an outbox when the product that wrote it is done. The reader's stream waits for the flag.

Why nothing is overwritten too early, without a word from the reader. Each kind of box is used in
turns that all ranks count alike, turn k has box k mod 2, and in every turn each rank hears from
each other. Before a rank's box of turn k is written, this rank has heard from that one in turn
k - 1. That message was sent after the other rank's stream had finished turn k - 2, the last that
read this box: every stream begins after what the calling stream has done, which waits for all of
them at the end of a turn (`order`, `sides`). The same holds for flags, so each box has its
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
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.peer_memory import ALIGNMENT, PeerMemory, peer_memory
from stepgauge.spec.units import round_up

BOXES = 2  # of each kind: one is read while the next is written
_INBOX, _OUTBOX = 0, 1
_SIDES = ("send", "tell", "receive")


class Exchange:
    """The boxes of a group, of so many bytes each. All ranks must make it, and use it, alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, box_bytes: int):
        self.rank, self.ranks = group.rank(), group.size()
        self.device, self.box_bytes = device, box_bytes
        # The other ranks in the order in which this one sends to them: each receives from one at a
        # time, in the reverse order.
        self.receivers = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.senders = self.receivers[::-1]
        flags = 2 * BOXES * self.ranks
        self.memory: PeerMemory = peer_memory(2 * BOXES, box_bytes, flags, device, group)
        self._turns = [0, 0]
        self._views: dict[Any, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._streams: dict[str, Any] = {}
        if device.type == "cuda":
            self._streams = {name: torch.cuda.Stream(device) for name in _SIDES}
            self._events = {name: torch.cuda.Event() for name in ("", *_SIDES)}
            self._ready = torch.cuda.Event()
            self._current = torch.cuda.current_stream(device)
        self.handles = {name: each.cuda_stream for name, each in self._streams.items()}

    def turn(self, kind: int) -> tuple[int, int]:
        """The number of the next turn of a kind of boxes, and its box."""
        self._turns[kind] += 1
        return self._turns[kind], BOXES * kind + self._turns[kind] % BOXES

    def view(self, box: int, shape: tuple[int, ...], dtype: torch.dtype, dim: int) -> Any:
        """This rank's box as a tensor, and its N parts along a dim."""
        key = box, shape, dtype
        if key not in self._views:
            nbytes = math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):  # they are used in training too
                whole = self.memory.box(self.rank, box)[:nbytes].view(dtype).view(shape)
                self._views[key] = whole, whole.chunk(self.ranks, dim)
        return self._views[key]

    def tell(self, rank: int, box: int, turn: int, side: str) -> None:
        self.memory.tell(rank, box * self.ranks + self.rank, turn, self.handles.get(side))

    def wait(self, rank: int, box: int, turn: int, side: str = "") -> None:
        self.memory.wait(box * self.ranks + rank, turn, self.handles.get(side))

    @contextlib.contextmanager
    def sides(self, *names: str) -> Iterator[None]:
        """Around a turn that uses these streams: at its end the calling one waits for them."""
        if not self._streams:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        if current != self._current:
            current.wait_stream(self._current)  # which called in the last turn
            self._current = current
        yield
        for name in names:
            self.order(name, "")

    def order(self, before: str, after: str) -> None:
        """A stream waits for what another has been given; "" is the calling one."""
        if self._streams:
            event = self._events[before]
            event.record(self._streams.get(before, self._current))
            self._streams.get(after, self._current).wait_event(event)

    def mark(self) -> None:
        """Where `send` may begin: the host first launches the product that runs meanwhile."""
        if self._streams:
            self._ready.record(self._current)

    def begin_sending(self) -> None:
        if self._streams:
            self._streams["send"].wait_event(self._ready)


class Inbox:
    """One turn: x_BTD of which this rank has x_BQD."""

    def __init__(self, exchange: Exchange, x_BQD: Tensor):
        self._exchange, self._piece = exchange, x_BQD.contiguous()
        exchange.mark()
        self._turn, self._box = exchange.turn(_INBOX)
        batch, length, width = x_BQD.shape
        shape = (batch, exchange.ranks * length, width)
        self._whole, self._rows = exchange.view(self._box, shape, x_BQD.dtype, 1)

    def send(self, *, to_own: bool) -> None:
        """This rank's piece, as it was when this was made, to all others; and to its own box where
        `whole` is wanted.
        """
        exchange = self._exchange
        exchange.begin_sending()
        for peer in exchange.receivers:
            self._copy(peer)
            exchange.tell(peer, self._box, self._turn, "send")
        if to_own:
            self._copy(exchange.rank)

    def _copy(self, rank: int) -> None:
        """A sequence at a time, whose rows are contiguous in the box."""
        exchange, memory = self._exchange, self._exchange.memory
        batch, nbytes = self._piece.shape[0], self._piece.nbytes // self._piece.shape[0]
        target, source = memory.address(rank, self._box), self._piece.data_ptr()
        for number in range(batch):
            place = (number * exchange.ranks + exchange.rank) * nbytes
            stream = exchange.handles.get("send")
            memory.copy(target + place, source + number * nbytes, nbytes, stream)

    def arrived(self, rank: int) -> Tensor:
        """Another rank's piece, for which the calling stream waits."""
        self._exchange.wait(rank, self._box, self._turn)
        rows_BQD: Tensor = self._rows[rank]
        return rows_BQD

    def whole(self) -> Tensor:
        """All pieces, sent with `to_own`, for which the calling stream waits."""
        for rank in self._exchange.senders:
            self.arrived(rank)
        self._exchange.order("send", "")
        whole_BTD: Tensor = self._whole
        return whole_BTD


class Outbox:
    """One turn: what this rank has for all, x_BTD, of which each takes its rows; and in `parts_NBQD`
    what all have for this one.
    """

    def __init__(self, exchange: Exchange, shape_BTD: tuple[int, int, int], like: Tensor):
        batch, length, width = shape_BTD
        self._exchange = exchange
        self._turn, self._box = exchange.turn(_OUTBOX)
        self.whole, self._rows = exchange.view(self._box, shape_BTD, like.dtype, 1)
        ranks = exchange.ranks
        self.parts_NBQD = like.new_empty((ranks, batch, length // ranks, width))
        exchange.order("", "receive")  # from here on the memory of `parts_NBQD` is free to write

    def piece(self, rank: int) -> Tensor:
        """Where the product for a rank is to be written, if products are made piece by piece; this
        rank's own goes straight into `parts_NBQD`.
        """
        if rank == self._exchange.rank:
            return self.parts_NBQD[rank]
        piece_BQD: Tensor = self._rows[rank]
        return piece_BQD

    def tell(self, *ranks: int) -> None:
        """That the pieces are there once the calling stream has done what it was given."""
        self._exchange.order("", "tell")
        for rank in ranks:
            self._exchange.tell(rank, self._box, self._turn, "tell")

    def receive(self) -> None:
        """Copies out what the others have for this rank, once they have said so."""
        for rank in self._exchange.senders:
            self._exchange.wait(rank, self._box, self._turn, "receive")
            self._copy(rank)

    def receive_own(self) -> None:
        """Copies out of `whole`, once the calling stream has written it."""
        self._exchange.order("", "receive")
        self._copy(self._exchange.rank)

    def _copy(self, rank: int) -> None:
        """A sequence at a time, whose rows are contiguous in the box."""
        exchange, memory, part_BQD = self._exchange, self._exchange.memory, self.parts_NBQD[rank]
        batch, nbytes = part_BQD.shape[0], part_BQD.nbytes // part_BQD.shape[0]
        source, target = memory.address(rank, self._box), part_BQD.data_ptr()
        stream = exchange.handles.get("receive")
        for number in range(batch):
            place = (number * exchange.ranks + exchange.rank) * nbytes
            memory.copy(target + number * nbytes, source + place, nbytes, stream)


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
        with torch.inference_mode(False):
            exchange = Exchange(group, device, round_up(nbytes, ALIGNMENT))
        _exchanges[group] = exchange
    return exchange
