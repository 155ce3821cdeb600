"""The mean of gradients over the GPUs of one machine by copy engines: multiprocessors, which compute
backward meanwhile, do no more than add.

A gradient is cut into pieces and a piece into a share a rank. In a turn each rank copies its part of
share r into an inbox of rank r; rank r adds what has come to its own part, and copies the mean into
a box of every other rank, which copies it to where its gradient lies. Each of the three has a stream.

Why nothing is overwritten too early. Turns use NUM_BOXES boxes one after another, and a rank begins
to send in a turn when its stream has all means of the turn NUM_BOXES before. Then every other rank
has read its inbox of that turn, since its mean came of it; and what this rank sends tells the others
that their boxes of means here are free.

Why nobody waits for ever. All ranks have the same turns in the same order, and each hands its
streams what others wait for before it lets one wait for them: true even where the driver, or a CPU,
serves the streams one after another.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.peer_memory import ALIGNMENT, peer_memory
from stepgauge.parallel.reducer import GradientReducer

NUM_BOXES = 2  # of each kind: one is read while the next is written
# of a gradient in a turn: most matrices go in one
PIECE_BYTES = 128 * 2**20
SEND, ADD, RECEIVE = range(3)


class CopyReducer(GradientReducer):
    """All-reduces on a device by copies; all ranks of the group, on one machine, must make it."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        piece_bytes: int = PIECE_BYTES,
    ):
        super().__init__(group)
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

    def launch(self, tensors: Sequence[Tensor]) -> Any:
        """As GradientReducer's, of contiguous tensors."""
        for tensor in tensors if self._others else ():
            flat = tensor.detach().view(-1)
            flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
            if self._streams[SEND] is not None:
                ready = torch.cuda.current_stream(self._device).record_event()
                for stream in self._streams:
                    stream.wait_event(ready)
            for piece in flat.split(self.ranks * self._share_bytes // flat.element_size()):
                self._average(piece)
        return CopyWork(self._received[self._turn % NUM_BOXES], tensors)

    def _average(self, piece: Tensor) -> None:
        self._turn += 1
        box = self._turn % NUM_BOXES
        shares = piece.tensor_split(self.ranks)
        if self._received[box] is not None:
            self._streams[SEND].wait_event(self._received[box])
        for rank in self._others:
            self._copy(shares[rank], rank, box, SEND)
        self._add(shares[self.rank], box)
        for rank in self._others:
            self._copy(shares[self.rank], rank, NUM_BOXES + box, ADD)
        for rank in self._others:
            self._wait(rank, NUM_BOXES + box, RECEIVE)
            source, share = self._place(self.rank, rank, NUM_BOXES + box), shares[rank]
            if share.nbytes:
                self._memory.copy(share.data_ptr(), source, share.nbytes, self._handle(RECEIVE))
        if self._streams[RECEIVE] is not None:
            self._received[box] = self._streams[RECEIVE].record_event()

    def _add(self, own: Tensor, box: int) -> None:
        """The mean of this rank's share, once all parts of it are there."""
        for rank in self._others:
            self._wait(rank, box, ADD)
        with torch.cuda.stream(self._streams[ADD]):
            parts = [self._part(rank, box, own) for rank in self._others]
            others = parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)
            own.lerp_(others, 1 - 1 / self.ranks)

    def _part(self, rank: int, box: int, like: Tensor) -> Tensor:
        start = self._order(self.rank, rank) * self._share_bytes
        whole = self._memory.box(self.rank, box)[start : start + like.nbytes]
        return whole.view(like.dtype)

    def _copy(self, share: Tensor, rank: int, box: int, side: int) -> None:
        """Into the box of another rank, which is told."""
        stream = self._handle(side)
        if share.nbytes:
            target = self._place(rank, self.rank, box)
            self._memory.copy(target, share.data_ptr(), share.nbytes, stream)
        self._memory.tell(rank, box * self.ranks + self.rank, self._turn, stream)

    def _wait(self, rank: int, box: int, side: int) -> None:
        self._memory.wait(box * self.ranks + rank, self._turn, self._handle(side))

    def _place(self, rank: int, sender: int, box: int) -> int:
        """The address in a rank's box of what a sender puts there."""
        return self._memory.address(rank, box) + self._order(rank, sender) * self._share_bytes

    def _order(self, rank: int, sender: int) -> int:
        return (sender - rank - 1) % self.ranks

    def _handle(self, side: int) -> int | None:
        stream = self._streams[side]
        return None if stream is None else stream.cuda_stream


class CopyWork:
    """Gradients on their way, kept until what is computed next sees their means."""

    def __init__(self, received: Any, tensors: Sequence[Tensor]):
        self._received, self._tensors = received, tensors

    def wait(self) -> None:
        if self._received is not None:
            torch.cuda.current_stream(self._tensors[0].device).wait_event(self._received)

    def is_completed(self) -> bool:
        return self._received is None or self._received.query()
