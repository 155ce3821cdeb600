"""Exchanges rows of activations between ranks of one machine, by copies that overlap with products.

A rank sends by copying into boxes of the receiver, in memory that its peers can reach
(peer_memory.py). There are two kinds of boxes, both with room for x_SD:

    gather   a rank sends its rows x_RD to every other rank; the receiver's box becomes x_SD
    scatter  a rank sends to every other rank that rank's rows of its own x_SD; the receiver's box
             becomes x_NRD, what all ranks sent, and the receiver sums it

Copy engines move the bytes, and no multiprocessor waits. All messages are pushed: copies out of
another GPU's memory took 1.2 to 2 times as long as copies into it
(docs/log/2026-11-28-graphs-and-lanes.md).

Why nothing is read too early. A sender sets a flag on the receiver after its copy, on the same stream.
The receiver's stream waits for the flag and clears it.

Why nothing is overwritten too early, although receivers send no acknowledgement. The two boxes of a
kind are used alternately: turn k uses box k mod 2, and all ranks count turns alike. In every turn
each rank gets a message from each other. Before this rank writes another rank's box in turn k, it has
received that rank's message of turn k - 1. That rank sent it after its calling stream had read the box
of turn k - 2, the last turn that used it, because messages of a turn wait for the calling stream
(`fork`). The same holds for the flags, so each box has its own: a flag that a rank has not cleared yet
is not set again. So a turn that has begun must send: it begins when its memory is allocated.

Why there is no deadlock. A rank's n-th wait in a turn comes after its own n-th message of that turn, in
the order of launches and, on a GPU, by events. So the messages are sent even if the driver serves the
streams one after the other, and on a CPU, where the host does each operation at once.

Turns can be captured in a CUDA graph: flags are always 1 or 0, and `captured` lets all ranks meet
before and after a replay, since the turns of two replays need not alternate boxes.

Memory that is sent must not be reused before the copy is done. This holds because the calling stream
waits for all messages of a turn (`rows`, `whole`, `sum`), and the tensors are kept until then. A
compiler that reuses memory therefore needs to know nothing else.

Legend: N ranks, R rows of a rank, S = N R rows of all, D width.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.groups_by_name import group_named
from stepgauge.parallel.communication.peer_memory import (
    PeerMemory,
    in_sending_order,
    peer_memory,
    with_room,
)

BOXES = 2  # per kind: one is read while the next is written
KINDS = GATHER, SCATTER = "gather", "scatter"  # of boxes; the messages of each have a stream
PartSum = Callable[[Tensor, Tensor, int], Tensor]  # as `part_sum_by_torch`
MOST_VIEWS = 256
_MEETINGS = 2  # before and after the replay of a CUDA graph


def part_sum_by_torch(parts_NRD: Tensor, own_RD: Tensor, rank: int) -> Tensor:
    """Returns the sum of the parts, of which `own_RD` is the one of that rank; what parts_NRD[rank]
    holds does not count.
    """
    parts_NRD[rank].copy_(own_RD)
    return parts_NRD.sum(0, dtype=parts_NRD.dtype)


class Exchange:
    """The boxes, flags and streams of a group. All ranks must create it, and use it, in the same way.

    receivers, senders  the other ranks, in the order in which they are sent to, and in which they send
    handles             kind -> handle of the CUDA stream; empty on a CPU. One stream sends to all
                        ranks, because a GPU has one engine for copies to others
    part_sum            sums the rows of all ranks
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, box_bytes: int):
        self.rank, self.ranks = group.rank(), group.size()
        self.device, self.box_bytes = device, box_bytes
        self.receivers, self.senders = in_sending_order(self.rank, self.ranks)
        boxes = len(KINDS) * BOXES
        flags = (boxes + _MEETINGS) * self.ranks
        self.memory: PeerMemory = peer_memory(boxes, box_bytes, flags, device, group)
        self.part_sum: PartSum = part_sum_by_torch
        self._turns = dict.fromkeys(KINDS, 0)
        self._views: dict[Any, Tensor] = {}
        self._streams: dict[str, Any] = {}
        self._current: Any = None
        if device.type == "cuda":
            self._streams = {kind: torch.cuda.Stream(device) for kind in KINDS}
            self._ready = {kind: torch.cuda.Event() for kind in KINDS}
            self._done = {kind: torch.cuda.Event() for kind in KINDS}
            self._sent = [torch.cuda.Event() for _ in self.receivers]
            self._current = torch.cuda.current_stream(device)
        self.handles = {kind: stream.cuda_stream for kind, stream in self._streams.items()}

    def begin_turn(self, kind: str) -> int:
        """Begins the next turn of a kind of boxes, on the current stream. Returns its box."""
        if self._streams:
            current = torch.cuda.current_stream(self.device)
            if current != self._current:
                current.wait_stream(self._current)  # the calling stream of the last turn
                self._current = current
        self._turns[kind] += 1
        return BOXES * KINDS.index(kind) + self._turns[kind] % BOXES

    def view(self, box: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns this rank's box as a tensor."""
        key = box, shape, dtype
        if len(self._views) > MOST_VIEWS:  # batches of many lengths
            self._views.clear()
        if key not in self._views:
            nbytes = math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):  # the views are kept and also used in training
                own = self.memory.box(self.rank, box)[:nbytes]
                self._views[key] = own.view(dtype).view(shape)
        return self._views[key]

    def copy(self, target: int, source: Tensor, kind: str) -> None:
        """Copies a contiguous tensor to an address, on the kind's stream."""
        self.memory.copy(target, source.data_ptr(), source.nbytes, self.handles.get(kind))

    def tell(self, rank: int, box: int, kind: str = "") -> None:
        """Sets this rank's flag for a box on another rank, after the work so far of the kind's stream
        ("": the calling stream).
        """
        self.memory.set_flag(rank, box * self.ranks + self.rank, 1, self.handles.get(kind))

    def wait(self, ranks: Iterable[int], box: int) -> None:
        """Makes the calling stream wait until these ranks have set their flags for a box, and clear
        them.
        """
        self.memory.consume(tuple(box * self.ranks + rank for rank in ranks))

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Encloses turns that the current stream captures in a CUDA graph."""
        turns, current = self._turns, self._current
        self._turns = dict.fromkeys(KINDS, 0)
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
        place = len(KINDS) * BOXES + meeting  # numbered like a box
        for rank in self.receivers:
            self.tell(rank, place)
        self.wait(self.senders, place)

    def mark_ready(self, kind: str) -> None:
        """Records the point on the calling stream at which sending may begin. The host can launch a
        product that overlaps with it before it calls `fork`.
        """
        if self._streams:
            self._ready[kind].record(self._current)

    def fork(self, kind: str) -> None:
        """Makes the kind's stream wait for the point that `mark_ready` recorded."""
        if self._streams:
            self._streams[kind].wait_event(self._ready[kind])

    def join(self, kind: str) -> None:
        """Makes the calling stream wait for the work launched so far on the kind's stream."""
        if self._streams:
            self._done[kind].record(self._streams[kind])
            self._current.wait_event(self._done[kind])

    def mark_sent(self, message: int) -> None:
        """Records the point after this rank's message of that number in a turn that gathers."""
        if self._streams:
            self._sent[message].record(self._streams[GATHER])

    def wait_until_sent(self, message: int) -> None:
        """Makes the calling stream wait for the point that `mark_sent` recorded."""
        if self._streams:
            self._current.wait_event(self._sent[message])


class Gather:
    """One turn that gathers x_SD, of which this rank has x_RD.

    keeps_own  this rank's rows are needed in x_SD, too: `whole` will be called
    """

    def __init__(self, exchange: Exchange, x_RD: Tensor, *, keeps_own: bool):
        self._exchange, self._own, self._keeps_own = exchange, x_RD.contiguous(), keeps_own
        self._box = exchange.begin_turn(GATHER)
        exchange.mark_ready(GATHER)
        shape = (exchange.ranks * x_RD.shape[0], x_RD.shape[1])
        self._whole = exchange.view(self._box, shape, x_RD.dtype)
        self._received = 0  # messages

    def send(self) -> None:
        """Sends this rank's rows, as they were when the turn began, to all other ranks, and then copies
        them into its own box if they are needed there.
        """
        exchange = self._exchange
        exchange.fork(GATHER)
        for message, peer in enumerate(exchange.receivers):
            self._copy_to(peer)
            exchange.tell(peer, self._box, GATHER)
            exchange.mark_sent(message)
        if self._keeps_own:
            self._copy_to(exchange.rank)

    def _copy_to(self, rank: int) -> None:
        exchange = self._exchange
        target = exchange.memory.address(rank, self._box) + exchange.rank * self._own.nbytes
        exchange.copy(target, self._own, GATHER)

    def rows(self, ranks: range) -> Tensor:
        """Returns the rows of these other ranks. The calling stream waits for them. To be called for
        groups in the order of `senders`.
        """
        for _ in ranks:
            self._exchange.wait_until_sent(self._received)
            self._received += 1
        self._exchange.wait(ranks, self._box)
        return rows_of(self._whole, ranks, self._exchange.ranks)

    def whole(self) -> Tensor:
        """Returns all rows. The calling stream waits for them."""
        self._exchange.join(GATHER)
        if not_received := self._exchange.senders[self._received :]:
            self._exchange.wait(not_received, self._box)
        return self._whole


class Scatter:
    """One turn that scatters x_SD, of which every rank takes the sum of all ranks' rows.

    whole  x_SD, to be written by this rank
    """

    def __init__(self, exchange: Exchange, shape_SD: tuple[int, int], like: Tensor):
        self._exchange, self.whole = exchange, like.new_empty(shape_SD)
        self._box = exchange.begin_turn(SCATTER)
        parts = (exchange.ranks, shape_SD[0] // exchange.ranks, shape_SD[1])
        self._parts_NRD = exchange.view(self._box, parts, like.dtype)

    def send(self, *ranks: int) -> None:
        """Sends these ranks their rows, after the calling stream's work so far."""
        exchange = self._exchange
        exchange.mark_ready(SCATTER)
        exchange.fork(SCATTER)
        for rank in ranks:
            rows_RD = rows_of(self.whole, rank, exchange.ranks)
            target = exchange.memory.address(rank, self._box) + exchange.rank * rows_RD.nbytes
            exchange.copy(target, rows_RD, SCATTER)
            exchange.tell(rank, self._box, SCATTER)

    def sum(self) -> Tensor:
        """Returns x_RD, the sum of this rank's rows over all ranks. The calling stream waits for them."""
        exchange = self._exchange
        exchange.join(SCATTER)
        exchange.wait(exchange.senders, self._box)
        own_RD = rows_of(self.whole, exchange.rank, exchange.ranks)
        return exchange.part_sum(self._parts_NRD, own_RD, exchange.rank)


def rows_of(x_SD: Tensor, group: range | int, ranks: int) -> Tensor:
    """Returns the rows of a rank, x_RD, or of a group of ranks."""
    length = x_SD.shape[0] // ranks
    group = range(group, group + 1) if isinstance(group, int) else group
    return x_SD.narrow(0, group.start * length, len(group) * length)


_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, Exchange] = weakref.WeakKeyDictionary()
_part_sums: weakref.WeakKeyDictionary[dist.ProcessGroup, PartSum] = weakref.WeakKeyDictionary()

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
    group = group_named(group_name)
    exchange = with_room(_exchanges, group, device, nbytes, Exchange)
    exchange.part_sum = _part_sums.get(group, part_sum_by_torch)
    return exchange


def use_part_sum(group: dist.ProcessGroup, part_sum: PartSum) -> None:
    """Lets the group's exchange sum rows so. Operators only have the group's name."""
    _part_sums[group] = part_sum
