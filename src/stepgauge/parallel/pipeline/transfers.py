"""Sends tensors between stages on different ranks, as messages of the process group.

Each direction of each edge (a Channel) has its own communicator, so a transfer never waits behind an
unrelated one. A channel carries micro-batches in the order in which the sending stage sends them;
the schedule's check ensures that receives are posted in the same order.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.pipeline.groups import new_groups, world_ranks
from stepgauge.parallel.pipeline.interfaces import Meta, as_bytes
from stepgauge.spec.plan.pipeline import Action, Channel, Schedule
from stepgauge.spec.plan.pipeline.action import SENDS

Posted = tuple[list[dist.Work], list[Tensor]]  # works, and the tensors that they read or write
T = TypeVar("T")


class Transfers:
    """The sends and receives of this rank.

    All ranks of the world must create one at the same time. The ranks of `group` are the schedule's
    ranks; None stands for all ranks.
    """

    can_restart = False  # messages of a step that raised would be received by the next

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup | None, device: torch.device):
        self._device = device
        self._rank = dist.get_rank(group)
        self._peer: dict[Channel, int] = {}
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._sent: dict[Channel, collections.deque[Posted]] = collections.defaultdict(
            collections.deque
        )
        self._received: dict[Action, Posted] = {}
        global_rank = world_ranks(group)
        channels = sorted({action.channel for _, action in schedule if action.kind in SENDS})
        pairs = [[schedule.rank_of[stage] for stage in channel] for channel in channels]
        groups = new_groups([[global_rank[rank] for rank in pair] for pair in pairs], group)
        for channel, pair, channel_group in zip(channels, pairs, groups, strict=True):
            if self._rank in pair:
                (other,) = set(pair) - {self._rank}
                self._peer[channel], self._groups[channel] = global_rank[other], channel_group
        self._connect(schedule)

    def _connect(self, schedule: Schedule) -> None:
        """Sends one value over each channel, in the same order on all ranks. The first message sets
        up the communicator, which blocks and could deadlock in the order of the schedule.
        """
        for channel in sorted(self._groups):
            value = torch.zeros(1, device=self._device)
            peer, group = self._peer[channel], self._groups[channel]
            if schedule.rank_of[channel.sender] == self._rank:
                dist.send(value, peer, group)
            else:
                dist.recv(value, peer, group)

    def prepare(self, messages: Mapping[Channel, Sequence[Meta]]) -> None:
        """Does nothing: messages may have any size."""

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Starts to send the tensors, and keeps them alive until they have been sent."""
        channel = action.channel
        peer, group = self._peer[channel], self._groups[channel]
        sent = self._sent[channel]
        while sent and all(work.is_completed() for work in sent[0][0]):
            sent.popleft()
        contiguous = [as_bytes(tensor) for tensor in tensors]
        works = [_require_work(dist.isend(tensor, peer, group)) for tensor in contiguous]
        sent.append((works, contiguous))

    def receive(self, action: Action, metas: Sequence[Meta]) -> None:
        """Starts to receive tensors of these shapes; `take` returns them."""
        peer, group = self._peer[action.channel], self._groups[action.channel]
        tensors = [meta.empty(self._device) for meta in metas]
        works = [_require_work(dist.irecv(tensor, peer, group)) for tensor in tensors]
        self._received[action] = works, tensors

    def take(self, action: Action) -> list[Tensor]:
        """Waits for the received tensors and returns them. On a GPU the current stream waits."""
        works, tensors = self._received.pop(action)
        for work in works:
            work.wait()
        return tensors

    def finish(self) -> None:
        """Waits for all sends."""
        for sent in self._sent.values():
            for works, _ in sent:
                for work in works:
                    work.wait()
            sent.clear()


def _require_work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


def broadcast_object(value: T | None, source: int, group: dist.ProcessGroup | None) -> T:
    """Returns the value that rank `source` of the group passes; the other ranks may pass None."""
    values = [value]
    dist.broadcast_object_list(values, world_ranks(group)[source], group)
    (received,) = values
    assert received is not None, "the source passes a value"
    return received


def send_to_next_stage(
    rank_of: Mapping[int, int],
    stage: int,
    outputs: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> list[Tensor]:
    """Sends the outputs of a stage to the rank of the next stage. Returns them there, and an empty
    list on other ranks. All ranks of the group must call it.
    """
    rank, global_rank = dist.get_rank(group), world_ranks(group)
    source, target = rank_of[stage], rank_of[stage + 1]
    metas = broadcast_object(
        [Meta.of(output) for output in outputs] if rank == source else None, source, group
    )
    if rank == source:
        for output in outputs:
            dist.send(as_bytes(output), global_rank[target], group)
    if rank != target:
        return []
    received = [meta.empty(device) for meta in metas]
    for tensor in received:
        dist.recv(tensor, global_rank[source], group)
    return received
