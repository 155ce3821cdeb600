"""All-gathers and reduce-scatters between the GPUs of one machine, by copies.

NCCL's kernels take multiprocessors from the products that run at the same time. Copy engines, which
move bytes between GPUs, take none; short kernels copy within a GPU and average. A message travels in
pieces through boxes in memory that the peers can reach (peer_memory.py):

- All-gather: each rank copies a piece of its tensor into a box of its own; each peer copies it out.
- Reduce-scatter: each rank copies a piece of each peer's rows into that peer's box, which has a place
  for every rank; the peer then averages them with its own.

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
from stepgauge.spec.plan.shards import COPY_BOXES, GATHER_BOX_BYTES, SCATTER_BOX_BYTES
from stepgauge.spec.units import ceil_div, round_up

Part = tuple[int, int, int]  # number of a tensor, its first byte, number of bytes


class CopiedCollectives:
    """The collectives of a group. All ranks must create it, and use it, in the same way."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        gather_bytes: int = GATHER_BOX_BYTES,
        scatter_bytes: int = SCATTER_BOX_BYTES,
    ):
        self._rank, self._ranks = group.rank(), group.size()
        self._gather = BoxTurns(group, device, gather_bytes)
        self._scatter = BoxTurns(group, device, scatter_bytes)

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> "CopiesWork":
        """Starts to write the inputs of all N ranks, in rank order, into each output of N times the
        size. All tensors are contiguous; those of different ranks have the same sizes.
        """
        with self._gather.running([*outputs, *inputs]) as work:
            self._gather_pieces(outputs, inputs)
        return work

    def _gather_pieces(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        turns, memory, handle = self._gather, self._gather.memory, self._gather.handle
        sizes = [part.nbytes for part in inputs]
        sources = [part.data_ptr() for part in inputs]
        targets = [whole.data_ptr() for whole in outputs]
        for parts in split_into_messages(sizes, turns.box_bytes):
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

    def reduce_scatter_mean(
        self, slices: Sequence[Tensor], wholes: Sequence[Tensor]
    ) -> "CopiesWork":
        """Starts to write this rank's rows of each whole tensor, averaged over the N ranks, into its
        slice. Each rank has ceil(rows/N) rows, the last ones fewer or none. All tensors are contiguous
        and of one floating-point dtype.
        """
        with self._scatter.running([*slices, *wholes]) as work:
            self._scatter_pieces(slices, wholes)
        return work

    def _scatter_pieces(self, slices: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        turns, memory = self._scatter, self._scatter.memory
        place_bytes = turns.box_bytes // self._ranks // ALIGNMENT * ALIGNMENT
        of_rank = [_bytes_of_rank(whole, self._ranks) for whole in wholes]
        for parts in split_into_messages(of_rank, place_bytes):
            box = turns.next_box()
            for peer in turns.peers:
                target = memory.address(peer, box) + self._rank * place_bytes
                for (tensor, first, nbytes), place in _placed(parts):
                    start = peer * of_rank[tensor] + first
                    if (count := min(nbytes, wholes[tensor].nbytes - start)) > 0:
                        source = wholes[tensor].data_ptr() + start
                        memory.copy(target + place, source, count, turns.handle)
                turns.tell(peer, box)
            turns.wait(turns.peers, box)
            received = memory.box(self._rank, box)
            for (tensor, first, nbytes), place in _placed(parts):
                mean = _bytes(slices[tensor], first, nbytes)
                start = self._rank * of_rank[tensor] + first
                addends = [
                    _bytes(wholes[tensor], start, mean.nbytes)
                    if rank == self._rank
                    else received[rank * place_bytes + place :][: mean.nbytes].view(mean.dtype)
                    for rank in range(self._ranks)
                ]
                with turns.on_stream():
                    average(addends, mean)


def _bytes_of_rank(whole: Tensor, ranks: int) -> int:
    """Returns the bytes of the rows that the first rank has; the last ones may have fewer."""
    rows = whole.shape[0]
    return ceil_div(rows, ranks) * (whole.nbytes // rows) if rows else 0


def _bytes(tensor: Tensor, first: int, nbytes: int) -> Tensor:
    """Returns these bytes of a contiguous tensor, or those of them that it has, as a flat view."""
    size = tensor.element_size()
    return tensor.view(-1)[first // size : (first + nbytes) // size]


def average(addends: Sequence[Tensor], mean: Tensor) -> None:
    """Writes the mean of at least two tensors. It is rounded once for each addend but the first, as in
    NCCL's ring; torch.mean, which rounds once, takes three times as long.
    """
    if mean.numel():
        left = addends[0]
        for count, right in enumerate(addends[1:], start=2):
            torch.lerp(left, right, 1 / count, out=mean)
            left = mean


class BoxTurns:
    """Boxes that every rank of a group has and that are used in turn, with a stream for the copies.

    peers   the other ranks; each rank begins with another one
    handle  of the stream; None on a CPU
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, box_bytes: int):
        self.box_bytes, self._device = box_bytes, device
        self._rank, self._ranks = group.rank(), group.size()
        self.peers = tuple((self._rank + step) % self._ranks for step in range(1, self._ranks))
        self.memory: PeerMemory = peer_memory(
            COPY_BOXES, box_bytes, COPY_BOXES * self._ranks, device, group
        )
        self.handle, self._stream, self._turns = None, None, 0
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self.handle = self._stream.cuda_stream
            timeout: Any = group.get_group_store().timeout  # type: ignore[attr-defined]
            self._watch = StallWatch(self.memory, device, timeout.total_seconds())

    @contextlib.contextmanager
    def running(self, tensors: Sequence[Tensor]) -> Iterator["CopiesWork"]:
        """Encloses the launches of a collective of these tensors; yields its work. The copies run after
        the work launched so far on the current stream.
        """
        if self._stream is None:
            yield CopiesWork()
            return
        with torch.cuda.device(self._device):
            caller = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(caller)
            yield CopiesWork(event := torch.cuda.Event(), caller, tensors)
            event.record(self._stream)
            self._watch.mark(self._stream.cuda_stream)

    def on_stream(self) -> Any:
        """Returns a context in which torch's operations run after the copies."""
        return torch.cuda.stream(self._stream)

    def next_box(self) -> int:
        """Starts the next turn; returns its box."""
        self._turns += 1
        return self._turns % COPY_BOXES

    def tell(self, peer: int, box: int) -> None:
        """Sets this rank's flag for the box on a peer, after the copies so far."""
        self.memory.set_flag(peer, box * self._ranks + self._rank, 1, self.handle)

    def wait(self, peers: Sequence[int], box: int) -> None:
        """Makes later copies wait until these peers have set their flags for the box."""
        flags = tuple(box * self._ranks + peer for peer in peers)
        self.memory.consume(flags, self.handle)


class CopiesWork:
    """A collective that has been started. It keeps its tensors until it has been waited for.

    event   at its end; None on a CPU, where it is done
    caller  the stream that started it, in whose memory the tensors are
    """

    def __init__(self, event: Any = None, caller: Any = None, tensors: Sequence[Tensor] = ()):
        self._event, self._caller, self._tensors = event, caller, tensors

    def wait(self) -> None:
        """Makes the current stream wait until the collective is done."""
        if self._event is not None:
            torch.cuda.current_stream(self._caller.device).wait_event(self._event)
        self._tensors = ()

    def __del__(self) -> None:
        """After an error nobody waits, but the tensors' memory must not be used again too early."""
        if self._tensors:
            self._caller.wait_event(self._event)


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


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, CopiedCollectives]] = (
    weakref.WeakKeyDictionary()
)


def copied_collectives(group: dist.ProcessGroup, device: torch.device) -> CopiedCollectives:
    """Returns the collectives of the group. All ranks must call it at the same place of their program:
    the first call allocates their boxes.
    """
    by_device = _of_groups.setdefault(group, {})
    if device not in by_device:
        with torch.inference_mode(False):  # the boxes are kept and also used in training
            by_device[device] = CopiedCollectives(group, device)
    return by_device[device]
