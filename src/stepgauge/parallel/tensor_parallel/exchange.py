"""Exchanges pieces of activations between ranks of one machine, by copies that overlap with products.

Each rank has two kinds of boxes in memory that its peers can reach (peer_memory.py). An inbox x_BTD
has rows for every rank: each other rank copies its piece into its rows. An outbox x_BTD has a piece
x_BQD for every other rank, which that rank copies out. Copy engines move the bytes, and no
multiprocessor waits.

Why nothing is read too early. A sender sets a flag after its copy, on the same stream. The flag of an
outbox is set when the product that writes it is done. The reader's stream waits for the flag and
clears it.

Why nothing is overwritten too early, although readers send no acknowledgement. The two boxes of a
kind are used alternately: turn k uses box k mod 2, and all ranks count turns alike. In every turn
each rank gets a message from each other. Before this rank writes another rank's box in turn k, it has
received that rank's message of turn k - 1. That rank sent it after its streams had finished turn
k - 2, the last turn that read this box, because every stream starts a turn after the calling stream,
which waits for all of them at the end of a turn (`order`, `fork`, `turn_on`). The same holds for the flags,
so each box has its own: a flag that a rank has not cleared yet is not set again.

Why there is no deadlock. A rank's n-th wait in a turn comes after its own n-th message of that turn, in
the order of launches and, on a GPU, by events. If a turn of each kind runs at once, the wait for the
inbox comes after the tells of the outbox. So the messages are sent even if the driver serves the streams
one after the other, and on a CPU, where the host does each operation at once.

Turns can be captured in a CUDA graph: flags are always 1 or 0, and `captured` lets all ranks meet
before and after a replay, since the turns of two replays need not alternate boxes.

Memory that is sent must not be reused before the copy is done, and memory that is received into must
not be in use any more. Both hold because the other streams wait for the calling stream at the
beginning, and the calling stream waits for them at the end. A compiler that reuses memory therefore
needs to know nothing else.

Legend: B batch, T sequence, D width, N ranks, Q = T/N.
"""

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.groups_by_name import group_named
from stepgauge.parallel.communication.peer_memory import PeerMemory, peer_memory, with_room

BOXES = 2  # per kind: one is read while the next is written
_INBOX, _OUTBOX = 0, 1
_MEETINGS = 2  # before and after the replay of a CUDA graph
# Messages to or from several ranks travel at the same time, each on a stream: one copy after the other
# took 316 us for 3 x 16 MiB while the other GPUs copied too, of which the links need 112.
MOST_LANES = 3


class Exchange:
    """The boxes, flags and streams of a group. All ranks must create it, and use it, in the same way.

    receivers  the other ranks, in the order in which this rank sends to them
    senders    the other ranks, in the order in which they send to this rank
    lanes      of "send", "tell" and "receive", the names of the streams that share the messages
    handles    stream name -> CUDA stream handle; empty on a CPU
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, box_bytes: int):
        self.rank, self.ranks = group.rank(), group.size()
        self.device, self.box_bytes = device, box_bytes
        self.receivers = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.senders = self.receivers[::-1]
        flags = (2 * BOXES + _MEETINGS) * self.ranks
        self.memory: PeerMemory = peer_memory(2 * BOXES, box_bytes, flags, device, group)
        numbers = range(min(MOST_LANES, len(self.receivers)))
        self.lanes = {name: [f"{name} {n}" for n in numbers] for name in ("send", "receive")}
        self.lanes["tell"] = ["tell"]
        self._turns = [0, 0]
        self._views: dict[Any, Tensor] = {}
        self._streams: dict[str, Any] = {}
        self._current: Any = None
        if device.type == "cuda":
            names = [name for lanes in self.lanes.values() for name in lanes]
            self._streams = {name: torch.cuda.Stream(device) for name in names}
            self._events = {name: torch.cuda.Event() for name in ("", *names)}
            self._ready = torch.cuda.Event()
            self._sent = [torch.cuda.Event() for _ in self.receivers]
            self._current = torch.cuda.current_stream(device)
        self.handles = {name: stream.cuda_stream for name, stream in self._streams.items()}

    def next_box(self, kind: int) -> int:
        """Starts the next turn of a kind of boxes. Returns its box."""
        self._turns[kind] += 1
        return BOXES * kind + self._turns[kind] % BOXES

    def view(self, box: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns this rank's box as a tensor."""
        key = box, shape, dtype
        if key not in self._views:
            nbytes = math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):  # the views are kept and also used in training
                own = self.memory.box(self.rank, box)[:nbytes]
                self._views[key] = own.view(dtype).view(shape)
        return self._views[key]

    def tell(self, rank: int, box: int, stream: str = "") -> None:
        """Sets this rank's flag for a box on another rank, after the stream's work so far."""
        self.memory.set_flag(rank, box * self.ranks + self.rank, 1, self.handles.get(stream))

    def wait(self, ranks: Iterable[int], box: int, stream: str = "") -> None:
        """Makes a stream ("": the calling one) wait until these ranks have set their flags for a box,
        and clear them.
        """
        flags = tuple(box * self.ranks + rank for rank in ranks)
        self.memory.consume(flags, self.handles.get(stream))

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Encloses turns that the current stream captures in a CUDA graph."""
        turns, current = self._turns, self._current
        self._turns = [0, 0]
        if self._streams:
            self._current = torch.cuda.current_stream(self.device)
        try:
            self._meet(0)
            yield
            self._meet(1)
        finally:
            self._turns, self._current = turns, current

    def _meet(self, meeting: int) -> None:
        """Makes the calling stream wait until those of all ranks are here."""
        place = 2 * BOXES + meeting  # numbered like a box
        for rank in self.receivers:
            self.tell(rank, place)
        self.wait(self.senders, place)

    @contextlib.contextmanager
    def turn_on(self, *names: str) -> Iterator[None]:
        """Encloses a turn that uses these lanes. At its end the calling stream waits for them."""
        if not self._streams:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        if current != self._current:
            current.wait_stream(self._current)  # the calling stream of the last turn
            self._current = current
        yield
        for name in names:
            self.join(name)

    def order(self, before: str, after: str) -> None:
        """Makes stream `after` wait for the work launched so far on stream `before`. "" stands for
        the calling stream.
        """
        if self._streams:
            event = self._events[before]
            event.record(self._streams.get(before, self._current))
            self._streams.get(after, self._current).wait_event(event)

    def lane(self, name: str, message: int) -> str:
        """Returns the stream for the message of that number in a turn."""
        lanes = self.lanes[name]
        return lanes[message % len(lanes)]

    def fork(self, name: str) -> None:
        """Makes these lanes wait for the work launched so far on the calling stream."""
        if self._streams:
            self._events[""].record(self._current)
            self._let_wait(name, self._events[""])

    def join(self, name: str) -> None:
        """Makes the calling stream wait for the work launched so far on these lanes."""
        for lane in self.lanes[name]:
            self.order(lane, "")

    def mark_ready(self) -> None:
        """Records the point on the calling stream at which sending may begin. The host launches the
        product that overlaps with it before it calls `begin_sending`.
        """
        if self._streams:
            self._ready.record(self._current)

    def begin_sending(self) -> None:
        """Makes the lanes of "send" wait for the point that `mark_ready` recorded."""
        if self._streams:
            self._let_wait("send", self._ready)

    def _let_wait(self, name: str, event: Any) -> None:
        for lane in self.lanes[name]:
            self._streams[lane].wait_event(event)

    def mark_sent(self, message: int, lane: str) -> None:
        """Records the point on the lane after this rank's message of that number in a turn."""
        if self._streams:
            self._sent[message].record(self._streams[lane])

    def wait_until_sent(self, message: int) -> None:
        """Makes the calling stream wait for the point that `mark_sent` recorded."""
        if self._streams:
            self._current.wait_event(self._sent[message])


class Inbox:
    """One turn of an inbox: gathers x_BTD, of which this rank has x_BQD."""

    def __init__(self, exchange: Exchange, x_BQD: Tensor):
        self._exchange, self._piece = exchange, x_BQD.contiguous()
        exchange.mark_ready()
        self._box = exchange.next_box(_INBOX)
        batch, length, width = x_BQD.shape
        shape = (batch, exchange.ranks * length, width)
        self._whole = exchange.view(self._box, shape, x_BQD.dtype)
        self._received = 0  # messages

    def send(self, *, to_own: bool) -> None:
        """Sends this rank's piece, as it was when the inbox was created, to all other ranks. With
        `to_own` also into this rank's own box, which `whole` needs.
        """
        exchange = self._exchange
        exchange.begin_sending()
        for message, peer in enumerate(exchange.receivers):
            lane = exchange.lane("send", message)
            self._copy(peer, lane)
            exchange.tell(peer, self._box, lane)
            exchange.mark_sent(message, lane)
        if to_own:
            self._copy(exchange.rank, exchange.lane("send", len(exchange.receivers)))

    def _copy(self, rank: int, lane: str) -> None:
        """Copies one sequence at a time, since its rows are contiguous in the box."""
        exchange, memory = self._exchange, self._exchange.memory
        batch, nbytes = self._piece.shape[0], self._piece.nbytes // self._piece.shape[0]
        target, source = memory.address(rank, self._box), self._piece.data_ptr()
        stream = exchange.handles.get(lane)
        for number in range(batch):
            place = (number * exchange.ranks + exchange.rank) * nbytes
            memory.copy(target + place, source + number * nbytes, nbytes, stream)

    def pieces(self, ranks: range) -> Tensor:
        """Returns the pieces of these other ranks. The calling stream waits for them. To be called for
        groups in the order of `senders`.
        """
        length = self._piece.shape[1]
        for _ in ranks:
            self._exchange.wait_until_sent(self._received)
            self._received += 1
        self._exchange.wait(ranks, self._box)
        return self._whole.narrow(1, ranks.start * length, len(ranks) * length)

    def whole(self) -> Tensor:
        """Returns all pieces, sent with `to_own`. The calling stream waits for them."""
        self._exchange.join("send")
        if not_received := self._exchange.senders[self._received :]:
            self._exchange.wait(not_received, self._box)
        return self._whole


class Outbox:
    """One turn of an outbox: scatters x_BTD, of which every rank takes its rows.

    whole       x_BTD, to be written by this rank; its own rows may go into `parts_NBQD` instead
    parts_NBQD  what this rank receives: its rows of every rank's x_BTD
    """

    def __init__(self, exchange: Exchange, shape_BTD: tuple[int, int, int], like: Tensor):
        batch, length, width = shape_BTD
        self._exchange = exchange
        self._box = exchange.next_box(_OUTBOX)
        self.whole = exchange.view(self._box, shape_BTD, like.dtype)
        ranks = exchange.ranks
        self.parts_NBQD = like.new_empty((ranks, batch, length // ranks, width))
        self._messages = enumerate(exchange.senders)
        exchange.fork("receive")  # the memory of `parts_NBQD` may be in use until here

    def tell(self, *ranks: int) -> None:
        """Tells the ranks that their rows are there, after the calling stream's work so far. Receives as
        many messages of other ranks.
        """
        self._exchange.order("", "tell")
        for rank in ranks:
            self._exchange.tell(rank, self._box, "tell")
        self._receive(len(ranks))

    def _receive(self, count: int) -> None:
        """Copies out this rank's rows of the next `count` outboxes, once they are there."""
        exchange = self._exchange
        for message, rank in itertools.islice(self._messages, count):
            lane = exchange.lane("receive", message)
            exchange.order("tell", lane)
            exchange.wait((rank,), self._box, lane)
            self._copy(rank, lane)

    def receive_own(self) -> None:
        """Copies this rank's own rows out of `whole`, after the calling stream's work so far."""
        lane = self._exchange.lane("receive", 0)
        self._exchange.order("", lane)
        self._copy(self._exchange.rank, lane)

    def _copy(self, rank: int, lane: str) -> None:
        """Copies one sequence at a time, since its rows are contiguous in the box."""
        exchange, memory, part_BQD = self._exchange, self._exchange.memory, self.parts_NBQD[rank]
        batch, nbytes = part_BQD.shape[0], part_BQD.nbytes // part_BQD.shape[0]
        source, target = memory.address(rank, self._box), part_BQD.data_ptr()
        stream = exchange.handles.get(lane)
        for number in range(batch):
            place = (number * exchange.ranks + exchange.rank) * nbytes
            memory.copy(target + number * nbytes, source + place, nbytes, stream)


_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, Exchange] = weakref.WeakKeyDictionary()

# Exchanges whose addresses a CUDA graph has. They stay, even if a larger one has replaced them.
_captured: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Exchange]] = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def captured_turns(group: dist.ProcessGroup) -> Iterator[None]:
    """Encloses work that the current stream captures in a CUDA graph. All ranks must have run the same
    work before, must capture it, and must replay it equally often. Replays and other turns must not run
    at the same time; the graph must be destroyed before the group.
    """
    exchange = _exchanges.get(group)
    if exchange and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _captured.setdefault(group, []).append(exchange)
    with exchange.captured() if exchange else contextlib.nullcontext():
        yield


def exchange_of(group_name: str, device: torch.device, nbytes: int) -> Exchange:
    """Returns the group's exchange, with boxes of at least `nbytes`. All ranks must call it."""
    return with_room(_exchanges, group_named(group_name), device, nbytes, Exchange)
