"""The mean of gradients over the GPUs of one machine by copy engines: multiprocessors, which compute
backward meanwhile, do no more than add.

Gradients are sent where they lie, a few small ones or a piece of a large one in a turn, each cut into
a share a rank. Each rank copies its part of share r into an inbox of rank r; rank r adds what has
come to its own part, and copies the mean into a box of every other rank, which copies it to where
its gradient lies. Each of the three has a stream.

Why nothing is overwritten too early. Turns use NUM_BOXES boxes one after another, and a rank begins
to send in a turn when it has all means of the turn NUM_BOXES before, and has sent its own. Then every
other rank has read its inbox of that turn, since its mean came of it; and what this rank sends tells
the others that their boxes of means here are free.

Why nobody waits for ever. All ranks have the same turns in the same order, and each hands its
streams what others wait for before it lets one wait for them: true even where the driver, or a CPU,
serves the streams one after another.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.peer_memory import ALIGNMENT, on_one_machine, peer_memory
from stepgauge.parallel.reducer import GradientReducer
from stepgauge.parallel.sharding import real

NUM_BOXES = 2  # of each kind: one is read while the next is written
# of a gradient in a turn: most matrices go in one
PIECE_BYTES = 128 * 2**20
SEND, ADD, RECEIVE = range(3)
# Of a turn: where it begins in a box, and a tensor's shares by rank.
Part = tuple[int, Sequence[Tensor]]


class CopyReducer(GradientReducer):
    """All-reduces on a device by copies. All ranks of the group must make it.

    Raises ValueError for ranks on several machines; `launch` RuntimeError in a CUDA graph, which
    would replay the numbers of its turns.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        piece_bytes: int = PIECE_BYTES,
    ):
        super().__init__(group)
        if not on_one_machine(self.group):
            raise ValueError(
                "copies is True; the ranks are on several machines, and copies reach one"
            )
        self._device = device
        share = -(-piece_bytes // self.ranks // ALIGNMENT) * ALIGNMENT
        self._share_bytes, self._others = share, [r for r in range(self.ranks) if r != self.rank]
        boxes, flags = 2 * NUM_BOXES, 2 * NUM_BOXES * self.ranks
        self._memory = peer_memory(boxes, share * max(1, self.ranks - 1), flags, device, self.group)
        self._turn = 0
        self._received: list[Any] = [None] * NUM_BOXES  # events, by box
        self._streams: list[Any] = [None] * 3
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(3)]
        self._handles = [stream and stream.cuda_stream for stream in self._streams]

    def launch(self, tensors: Sequence[Tensor]) -> Any:
        """As GradientReducer's, of contiguous tensors."""
        if self._others:
            if self._streams[SEND] is not None:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError("gradients that are averaged by copies cannot be recorded")
                ready = torch.cuda.current_stream(self._device).record_event()
                for stream in self._streams:
                    stream.wait_event(ready)
            for piece in self._pieces(tensors):
                self._average(piece)
        return CopyWork(self._received[self._turn % NUM_BOXES], tensors)

    def _pieces(self, tensors: Sequence[Tensor]) -> Iterator[list[Part]]:
        """What each turn averages."""
        piece: list[Part] = []
        place = 0
        for tensor in tensors:
            flat = real(tensor.detach())
            for part in flat.split(self.ranks * self._share_bytes // flat.element_size()):
                shares = part.tensor_split(self.ranks)
                nbytes = -(-shares[0].nbytes // ALIGNMENT) * ALIGNMENT
                if place + nbytes > self._share_bytes:
                    yield piece
                    piece, place = [], 0
                piece.append((place, shares))
                place += nbytes
        yield piece

    def _average(self, piece: Sequence[Part]) -> None:
        self._turn += 1
        box = self._turn % NUM_BOXES
        if self._received[box] is not None:
            self._streams[SEND].wait_event(self._received[box])
        for rank in self._others:
            self._send(piece, rank, rank, box, SEND)
        self._add(piece, box)
        for rank in self._others:
            self._send(piece, self.rank, rank, NUM_BOXES + box, ADD)
        for rank in self._others:
            self._wait(rank, NUM_BOXES + box, RECEIVE)
            source = self._memory.address(self.rank, NUM_BOXES + box) + self._start(rank)
            for place, shares in piece:
                self._copy(shares[rank].data_ptr(), source + place, shares[rank].nbytes, RECEIVE)
        if self._streams[RECEIVE] is not None:
            # Which computes the own share's mean, and reads it while it is sent.
            self._streams[RECEIVE].wait_stream(self._streams[ADD])
            self._received[box] = self._streams[RECEIVE].record_event()

    def _send(self, piece: Sequence[Part], share: int, rank: int, box: int, side: int) -> None:
        """A share into the box of another rank, which is told."""
        start = (self.rank - rank - 1) % self.ranks * self._share_bytes
        target = self._memory.address(rank, box) + start
        for place, shares in piece:
            self._copy(target + place, shares[share].data_ptr(), shares[share].nbytes, side)
        flag = box * self.ranks + self.rank
        self._memory.tell(rank, flag, self._turn, self._handles[side])

    def _add(self, piece: Sequence[Part], box: int) -> None:
        """The mean of this rank's share, once all parts of it are there."""
        for rank in self._others:
            self._wait(rank, box, ADD)
        inbox, starts = self._memory.box(self.rank, box), [self._start(r) for r in self._others]
        with torch.cuda.stream(self._streams[ADD]):
            for place, shares in piece:
                own = shares[self.rank]
                sent = [_view(inbox, start + place, own) for start in starts]
                others = sent[0] if len(sent) == 1 else torch.stack(sent).mean(0)
                own.lerp_(others, 1 - 1 / self.ranks)

    def _copy(self, target: int, source: int, nbytes: int, side: int) -> None:
        if nbytes:
            self._memory.copy(target, source, nbytes, self._handles[side])

    def _wait(self, rank: int, box: int, side: int) -> None:
        self._memory.wait(box * self.ranks + rank, self._turn, self._handles[side])

    def _start(self, sender: int) -> int:
        """Where in this rank's boxes the share is that a sender puts there."""
        return (sender - self.rank - 1) % self.ranks * self._share_bytes


def _view(box: Tensor, start: int, like: Tensor) -> Tensor:
    return box[start : start + like.nbytes].view(like.dtype)


class CopyWork:
    """Gradients on their way, kept until what is computed next sees their means."""

    def __init__(self, received: Any, tensors: Sequence[Tensor]):
        self._received, self._tensors = received, tensors

    def wait(self) -> None:
        if self._received is not None:
            torch.cuda.current_stream(self._tensors[0].device).wait_event(self._received)

    def is_completed(self) -> bool:
        return self._received is None or self._received.query()
