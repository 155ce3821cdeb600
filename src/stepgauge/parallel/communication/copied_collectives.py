"""All-gathers and reduce-scatters between the GPUs of one machine, by copies.

NCCL's kernels take multiprocessors from the products that run at the same time. Copy engines take
none. A message travels in pieces through boxes in memory that the peers can reach (peer_memory.py):

- All-gather: each rank copies a piece of its tensor into a box of its own; each peer copies it out.
- Reduce-scatter: each rank copies a piece of each peer's row into that peer's box, which has a place
  for every rank; the peer then averages the places. Means are computed in fp32 and rounded once.

Why nothing is read too early: a rank sets a flag on a peer after its copy, on the same stream, and
the peer's stream waits for the flag and clears it.

Why nothing is overwritten too early, although nobody acknowledges: two boxes are used alternately, and
in every turn each rank waits for a flag of each other. Before a rank writes a box in turn k, it has
seen every peer's flag of turn k - 1, which the peer's stream set after it had done turn k - 2, the
last one with this box.

Why there is no deadlock: all ranks start the same collectives in the same order, and in each turn
they set their flags before they wait. So it does not matter whether the driver serves the streams at
the same time or one after the other.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.peer_memory import ALIGNMENT, PeerMemory, peer_memory
from stepgauge.parallel.communication.stall_watch import StallWatch
from stepgauge.spec.units import round_up

BOXES = 2  # per kind of collective: one is read while the next is written
BOX_BYTES = 2**26
Part = tuple[int, int, int]  # number of a tensor, its first byte, number of bytes


class CopiedCollectives:
    """The collectives of a group. All ranks must create it, and use it, in the same way."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, box_bytes: int = BOX_BYTES):
        self._rank, self._ranks, self.device = group.rank(), group.size(), device
        self._box_bytes = box_bytes
        num_boxes = 2 * BOXES
        num_flags = num_boxes * self._ranks
        self._memory: PeerMemory = peer_memory(num_boxes, box_bytes, num_flags, device, group)
        peers = [(self._rank + step) % self._ranks for step in range(1, self._ranks)]
        self._gather, self._scatter = (
            BoxTurns(self._memory, self._rank, peers, range(first, first + BOXES), device)
            for first in (0, BOXES)
        )

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> "CopiesWork":
        """Starts to write the inputs of all N ranks, in rank order, into each output of N times the
        size. All tensors are contiguous; those of different ranks have the same sizes.
        """
        with self._gather.running([*outputs, *inputs]) as work:
            self._gather_pieces(outputs, inputs)
        return work

    def _gather_pieces(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        turns, memory, handle = self._gather, self._memory, self._gather.handle
        sizes = [part.nbytes for part in inputs]
        sources = [part.data_ptr() for part in inputs]
        targets = [whole.data_ptr() for whole in outputs]
        for parts in split_into_messages(sizes, self._box_bytes):
            box = turns.next_box()
            own = memory.address(self._rank, box)
            for (tensor, first, nbytes), place in _placed(parts):
                memory.copy(own + place, sources[tensor] + first, nbytes, handle)
            for peer in turns.peers:
                turns.tell(peer, box)
            for peer in turns.peers:
                turns.wait((peer,), box)
                theirs = memory.address(peer, box)
                for (tensor, first, nbytes), place in _placed(parts):
                    target = targets[tensor] + peer * sizes[tensor] + first
                    memory.copy(target, theirs + place, nbytes, handle)
        for source, target, nbytes in zip(sources, targets, sizes, strict=True):
            if nbytes:
                memory.copy(target + self._rank * nbytes, source, nbytes, handle)

    def reduce_scatter_mean(self, row: Tensor, message: Tensor) -> "CopiesWork":
        """Starts to write this rank's N-th of the message, averaged over the N ranks, into `row`.
        Both are contiguous and of one floating-point dtype.
        """
        with self._scatter.running([row, message]) as work:
            self._scatter_pieces(row, message)
        return work

    def _scatter_pieces(self, row: Tensor, message: Tensor) -> None:
        turns, memory, handle = self._scatter, self._memory, self._scatter.handle
        place_bytes = self._box_bytes // self._ranks // ALIGNMENT * ALIGNMENT
        for ((_, first, nbytes),) in split_into_messages([row.nbytes], place_bytes):
            box = turns.next_box()
            for rank in (*turns.peers, self._rank):
                source = message.data_ptr() + rank * row.nbytes + first
                target = memory.address(rank, box) + self._rank * place_bytes
                memory.copy(target, source, nbytes, handle)
                if rank != self._rank:
                    turns.tell(rank, box)
            turns.wait(turns.peers, box)
            places = memory.box(self._rank, box)[: self._ranks * place_bytes]
            parts = places.view(self._ranks, -1)[:, :nbytes].view(row.dtype)
            mean = row.view(torch.uint8)[first : first + nbytes].view(row.dtype)
            with turns.on_stream():
                torch.mean(parts, 0, out=mean)


class BoxTurns:
    """Boxes that every rank has and that are used in turn, with a stream for the copies.

    peers   the other ranks; each rank begins with another one
    handle  of the stream; None on a CPU
    """

    def __init__(
        self,
        memory: PeerMemory,
        rank: int,
        peers: Sequence[int],
        boxes: range,
        device: torch.device,
    ):
        self.peers, self.handle = tuple(peers), None
        self._memory, self._boxes, self._device = memory, boxes, device
        self._rank, self._ranks = rank, len(peers) + 1
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self.handle = self._stream.cuda_stream
            self._watch = StallWatch(memory, device, rank)
        self._turns = 0

    @contextlib.contextmanager
    def running(self, tensors: Sequence[Tensor]) -> Iterator["CopiesWork"]:
        """Encloses the launches of a collective of these tensors; yields its work. The copies run after
        the work launched so far on the current stream.
        """
        if self._stream is None:
            yield CopiesWork(None, self._device, ())
            return
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            yield CopiesWork(event := torch.cuda.Event(), self._device, tensors)
            event.record(self._stream)
            self._watch.mark(self._stream.cuda_stream)

    def on_stream(self) -> Any:
        """Returns a context in which torch's operations run after the copies."""
        return torch.cuda.stream(self._stream)

    def next_box(self) -> int:
        """Starts the next turn; returns its box."""
        self._turns += 1
        return self._boxes[self._turns % len(self._boxes)]

    def tell(self, peer: int, box: int) -> None:
        """Sets this rank's flag for the box on a peer, after the copies so far."""
        self._memory.set_flag(peer, box * self._ranks + self._rank, 1, self.handle)

    def wait(self, peers: Sequence[int], box: int) -> None:
        """Makes later copies wait until these peers have set their flags for the box."""
        flags = tuple(box * self._ranks + peer for peer in peers)
        self._memory.consume(flags, self.handle)


class CopiesWork:
    """A collective that has been started. It keeps its tensors until it has been waited for.

    event  at its end; None on a CPU, where it is done
    """

    def __init__(self, event: Any, device: torch.device, tensors: Sequence[Tensor]):
        self._event, self._device, self._tensors = event, device, tensors

    def wait(self) -> None:
        """Makes the current stream wait until the collective is done."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._tensors = ()


def split_into_messages(sizes: Sequence[int], most: int) -> Iterator[list[Part]]:
    """Yields messages that together have all bytes of tensors of these sizes, in order. In a message
    each part begins at a multiple of ALIGNMENT; it ends at `most` bytes, a multiple too.
    """
    message: list[Part] = []
    room = most
    for number, size in enumerate(sizes):
        first = 0
        while first < size:
            if not room:
                yield message
                message, room = [], most
            nbytes = min(room, size - first)
            message.append((number, first, nbytes))
            first += nbytes
            room -= min(room, round_up(nbytes, ALIGNMENT))
    if message:
        yield message


def _placed(parts: Sequence[Part]) -> Iterator[tuple[Part, int]]:
    """Yields the parts of a message, each with its place in the box."""
    place = 0
    for part in parts:
        yield part, place
        place += round_up(part[2], ALIGNMENT)


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, CopiedCollectives]
_of_groups = weakref.WeakKeyDictionary()


def copied_collectives(group: dist.ProcessGroup, device: torch.device) -> CopiedCollectives:
    """Returns the collectives of the group, which have boxes of 4 × BOX_BYTES. All ranks must call it
    at the same place of their program.
    """
    found = _of_groups.get(group)
    if found is None or found.device != device:
        with torch.inference_mode(False):  # the boxes are kept and also used in training
            found = _of_groups[group] = CopiedCollectives(group, device)
    return found
