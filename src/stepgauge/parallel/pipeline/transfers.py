"""Tensors between the stages of different ranks: one communicator a direction of an edge.

Each carries the micro-batches of one stage in the order in which that stage sends them, which the
checker has compared with the order of the receives. Nothing else travels on it, so that no transfer
waits behind one that it has nothing to do with.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.pipeline.between import Meta
from stepgauge.parallel.pipeline.groups import members, new_groups
from stepgauge.spec.plan.pipeline import Action, Channel, Schedule
from stepgauge.spec.plan.pipeline.action import SENDS

Posted = tuple[list[dist.Work], list[Tensor]]
Found = TypeVar("Found")


class Transfers:
    """The sends and receives of this rank. All ranks of the world must make one at the same time.

    group  its ranks are the schedule's; None: all ranks
    """

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup | None, device: torch.device):
        self._device = device
        self._rank = dist.get_rank(group)
        world = members(group)
        self._peer: dict[Channel, int] = {}
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._sent: dict[Channel, collections.deque[Posted]] = collections.defaultdict(
            collections.deque
        )
        self._received: dict[Action, Posted] = {}
        channels = sorted({action.channel for _, action in schedule if action.kind in SENDS})
        ranks = [[schedule.rank_of[stage] for stage in channel] for channel in channels]
        made = new_groups([[world[rank] for rank in pair] for pair in ranks], group)
        for channel, pair, own in zip(channels, ranks, made, strict=True):
            if self._rank in pair:
                (other,) = set(pair) - {self._rank}
                self._peer[channel], self._groups[channel] = world[other], own
        self._meet(schedule)

    def _meet(self, schedule: Schedule) -> None:
        """A first message on each channel, in one order on all ranks: what it sets up blocks."""
        for channel in sorted(self._groups):
            word = torch.zeros(1, device=self._device)
            peer, group = self._peer[channel], self._groups[channel]
            if schedule.rank_of[channel.sender] == self._rank:
                dist.send(word, peer, group)
            else:
                dist.recv(word, peer, group)

    def prepare(self, messages: Mapping[Channel, Sequence[Meta]]) -> None:
        """Nothing: messages of any size travel."""

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Begins to send, and keeps the tensors until they have been."""
        channel = action.channel
        peer, group = self._peer[channel], self._groups[channel]
        sent = self._sent[channel]
        while sent and all(work.is_completed() for work in sent[0][0]):
            sent.popleft()
        whole = [tensor.contiguous() for tensor in tensors]
        sent.append(([_begun(dist.isend(tensor, peer, group)) for tensor in whole], whole))

    def receive(self, action: Action, metas: Sequence[Meta]) -> None:
        """Begins to receive tensors of these shapes, for `take`."""
        peer, group = self._peer[action.channel], self._groups[action.channel]
        tensors = [meta.empty(self._device) for meta in metas]
        works = [_begun(dist.irecv(tensor, peer, group)) for tensor in tensors]
        self._received[action] = works, tensors

    def take(self, action: Action) -> list[Tensor]:
        """What was received, when it is there: on a GPU, for the current stream."""
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


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is of the group"
    return work


def shared(found: Found | None, owner: int, group: dist.ProcessGroup | None) -> Found:
    """What a rank of the group has found, on all of them."""
    told = [found]
    dist.broadcast_object_list(told, members(group)[owner], group)
    (value,) = told
    assert value is not None, "the owner has found it"
    return value


def handed(owners: Mapping[int, int], stage: int, values: Sequence[Tensor],
           group: dist.ProcessGroup | None, device: torch.device) -> list[Tensor]:  # fmt: skip
    """What a stage gives, on the rank of the next one; on other ranks nothing."""
    rank, world = dist.get_rank(group), members(group)
    mine = rank == owners[stage]
    metas = shared([Meta.of(value) for value in values] if mine else None, owners[stage], group)
    if mine:
        for value in values:
            dist.send(value.contiguous(), world[owners[stage + 1]], group)
    if rank != owners[stage + 1]:
        return []
    received = [meta.empty(device) for meta in metas]
    for tensor in received:
        dist.recv(tensor, world[owners[stage]], group)
    return received
