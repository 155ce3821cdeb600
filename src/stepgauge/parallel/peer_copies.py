"""Averages by copies into the other ranks' memory: on GPUs the copy engines move the bytes, not
multiprocessors.

NCCL's kernels hold multiprocessors, which backward wants at the same time, while they wait for each
other. Here a message is cut into a share a rank. Each rank copies its part of share r to rank r,
which averages what came with its own and copies the mean to all: 2(N − 1)/N of the bytes a rank, as
a ring sends, and only averaging is a kernel.

A long message goes in pieces that take turns in a few slots, each with a stream of its own, so that
one piece is averaged while another travels.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.mean import mean_with
from stepgauge.parallel.messages import Done
from stepgauge.parallel.peer_memory import peer_memory

STAGING_BYTES = {"cuda": 512 * 2**20, "cpu": 8 * 2**20}  # of a rank, in all slots
SLOTS = 3
ALIGNMENT = 512
PARTS, MEANS = 0, 1  # the two boxes that a slot has for each peer


class Copies:
    """A message whose copies are under way on streams of a GPU."""

    def __init__(self, device: torch.device, ends: Sequence[torch.cuda.Event]):
        self._device, self._ends = device, ends

    def wait(self) -> None:
        """The current stream waits for the copies, the host goes on."""
        for end in self._ends:
            torch.cuda.current_stream(self._device).wait_event(end)

    def is_completed(self) -> bool:
        return all(end.query() for end in self._ends)


class PeerCopies:
    """As `Averager`, within one machine. All ranks launch the same messages in the same order.

    Raises ValueError, on every rank, where the ranks cannot write to each other.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.peers = [rank for rank in range(self.ranks) if rank != self.rank]
        boxes = SLOTS * 2 * max(1, len(self.peers))
        self._box_bytes = STAGING_BYTES[device.type] // boxes // ALIGNMENT * ALIGNMENT
        self._memory = peer_memory(boxes * self._box_bytes, device, self.group)
        self._device = device
        self._streams = (
            [torch.cuda.Stream(device, priority=-1) for _ in range(SLOTS)]
            if device.type == "cuda"
            else []
        )
        self._turns = itertools.cycle(range(SLOTS))
        self._cached_box = functools.cache(self._make_box)

    def takes_lists(self, device: torch.device) -> bool:
        return False

    def launch(self, message: Tensor, *, owner: int | None = None) -> Copies | Done:
        """Averages in place on all ranks, or on the owner alone: on the others the message is then
        undefined.
        """
        most = self._box_bytes // message.element_size()
        pieces = message.view(-1).split(most * self.ranks if owner is None else most)
        if self._streams:
            ready = torch.cuda.current_stream(self._device).record_event()
            return Copies(self._device, self._launch_pieces(ready, pieces, owner))
        for piece in pieces:
            self._average(piece, owner, next(self._turns))
        return Done()

    @torch.no_grad()
    def _launch_pieces(
        self, ready: torch.cuda.Event, pieces: Sequence[Tensor], owner: int | None
    ) -> list[torch.cuda.Event]:
        ends = {}
        for piece in pieces:
            slot = next(self._turns)
            stream = self._streams[slot]
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                self._average(piece, owner, slot)
                ends[slot] = stream.record_event()
        return list(ends.values())

    def _average(self, piece: Tensor, owner: int | None, slot: int) -> None:
        """After the first barrier the parts are there. After the second the means are, and parts
        may be overwritten.
        """
        shares = self._shares(piece, owner)
        mine = shares[self.rank]
        for peer in self.peers:
            self._box(peer, self.rank, slot, PARTS, shares[peer]).copy_(shares[peer])
        self._memory.barrier(slot)
        if mine.numel() and self.peers:
            mean_with(mine, [self._box(self.rank, peer, slot, PARTS, mine) for peer in self.peers])
        if owner is None:
            for peer in self.peers:
                self._box(peer, self.rank, slot, MEANS, mine).copy_(mine)
        self._memory.barrier(slot)
        if owner is None:
            for peer in self.peers:
                shares[peer].copy_(self._box(self.rank, peer, slot, MEANS, shares[peer]))

    def _shares(self, piece: Tensor, owner: int | None) -> Sequence[Tensor]:
        """What of the piece each rank averages: a part each, or all of it the owner."""
        if owner is None:
            return piece.tensor_split(self.ranks)
        return [piece if rank == owner else piece[:0] for rank in range(self.ranks)]

    def _box(self, receiver: int, sender: int, slot: int, kind: int, like: Tensor) -> Tensor:
        """The receiver's memory for what the sender gives it, as a tensor of the same type and
        length.
        """
        return self._cached_box(receiver, sender, slot, kind, like.dtype, like.numel())

    def _make_box(
        self, receiver: int, sender: int, slot: int, kind: int, dtype: torch.dtype, numel: int
    ) -> Tensor:
        neighbour = sender - (sender > receiver)
        start = ((slot * 2 + kind) * len(self.peers) + neighbour) * self._box_bytes
        return self._memory.on_rank[receiver][start : start + numel * dtype.itemsize].view(dtype)
