"""Averages by copies into the other ranks' memory: on GPUs the copy engines move the bytes, not multiprocessors.

NCCL's kernels hold multiprocessors, which backward wants at the same time, while they wait for each other. Here a
message is cut into a share a rank. Each rank copies its part of share r to rank r, which averages what came with its
own and copies the mean to all: 2(N − 1)/N of the bytes a rank, as a ring sends, and only averaging is a kernel.

A long message goes in pieces that take turns in a few slots, each with a stream of its own, so that one piece is
averaged while another travels.
"""

import functools
import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.mean import mean_with
from stepgauge.parallel.peer_memory import peer_memory

STAGING_BYTES = {"cuda": 512 * 2**20, "cpu": 8 * 2**20}  # of a rank, in all slots
SLOTS = 3
ALIGNMENT = 512  # bytes: where a share or a box begins
PARTS, MEANS = 0, 1  # the two boxes that a slot has for each peer


class Copies:
    """A message whose copies are under way on streams of a GPU. On CPUs they are done."""

    def __init__(self, ends: list[torch.cuda.Event | None]):
        self._ends = [end for end in ends if end is not None]

    def wait(self) -> None:
        """The current stream waits for the copies, the host goes on."""
        for end in self._ends:
            torch.cuda.current_stream(end.device).wait_event(end)

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
        self._bases = [there.data_ptr() for there in self._memory.on_rank]
        self._turns = itertools.cycle(range(SLOTS))
        self._parts = functools.cache(self._make_parts)

    @torch.no_grad()
    def launch(self, message: Tensor, *, owner: int | None = None) -> Copies:
        """Averages in place on all ranks, or on the owner alone: on the others the message is then undefined."""
        most = self._box_bytes // message.element_size()
        ends = {}
        for piece in message.split(most * self.ranks if owner is None else most):
            slot = next(self._turns)
            self._memory.begin(slot)
            self._average(piece, owner, slot)
            ends[slot] = self._memory.end(slot)
        return Copies(list(ends.values()))

    def _average(self, piece: Tensor, owner: int | None, slot: int) -> None:
        """After the first barrier the parts are there. After the second the means are, and parts may be overwritten."""
        memory, item, start = self._memory, piece.element_size(), piece.data_ptr()
        shares = self._shares(piece, owner)
        begin, end = shares[self.rank]
        for peer in self.peers:
            first, last = shares[peer]
            memory.copy(slot, self._box(peer, self.rank, slot, PARTS), start + first * item, (last - first) * item)
        memory.barrier(slot)
        if end > begin and self.peers:
            mean_with(piece[begin:end], self._parts(slot, piece.dtype, end - begin), memory.stream(slot))
        if owner is None:
            for peer in self.peers:
                box = self._box(peer, self.rank, slot, MEANS)
                memory.copy(slot, box, start + begin * item, (end - begin) * item)
        memory.barrier(slot)
        if owner is None:
            for peer in self.peers:
                first, last = shares[peer]
                box = self._box(self.rank, peer, slot, MEANS)
                memory.copy(slot, start + first * item, box, (last - first) * item)

    def _shares(self, piece: Tensor, owner: int | None) -> list[tuple[int, int]]:
        """What of the piece each rank averages, as (first, end): a part each, or all of it the owner."""
        numel = piece.numel()
        if owner is not None:
            return [(0, numel) if rank == owner else (0, 0) for rank in range(self.ranks)]
        granule = ALIGNMENT // piece.element_size()
        length = -(-numel // (self.ranks * granule)) * granule
        return [(min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(self.ranks)]

    def _offset(self, receiver: int, sender: int, slot: int, kind: int) -> int:
        neighbour = sender - (sender > receiver)
        return ((slot * 2 + kind) * len(self.peers) + neighbour) * self._box_bytes

    def _box(self, receiver: int, sender: int, slot: int, kind: int) -> int:
        """The address of the receiver's memory for what the sender gives it."""
        return self._bases[receiver] + self._offset(receiver, sender, slot, kind)

    def _make_parts(self, slot: int, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """What the peers have given for this rank's share, as tensors."""
        own = self._memory.on_rank[self.rank]
        starts = [self._offset(self.rank, peer, slot, PARTS) for peer in self.peers]
        return [own[start : start + numel * dtype.itemsize].view(dtype) for start in starts]
