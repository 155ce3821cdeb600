"""Tensors between the stages of ranks on one machine, by copies into the receiver's memory.

The copy engines move the bytes. A channel has a few boxes on its receiver. The sender waits until
the box of its next message is free, copies into it and says so; the receiver waits for that, copies
out and says that the box is free again. Each side of a channel has a stream of its own, so that
computing waits for nothing but what it reads.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.peer_memory import ALIGNMENT, PeerMemory, peer_memory
from stepgauge.parallel.pipeline.between import Meta
from stepgauge.spec.plan.pipeline import Action, Channel, Schedule
from stepgauge.spec.plan.pipeline.action import SENDS
from stepgauge.spec.units import round_up

BOXES = 3  # of a channel on a GPU: one is read, one is there, one is being written


class Side:
    """What this rank has of a channel: its sending or its receiving side.

    peer         the other rank
    place        of the channel among those that the receiver receives on
    sent_flags, free_flags   first flag of the channel on the receiver, and on the sender
    messages     how many there have been
    """

    def __init__(self, peer: int, place: int, sent_flags: int, free_flags: int, stream: Any):
        self.peer, self.place, self.stream = peer, place, stream
        self.sent_flags, self.free_flags = sent_flags, free_flags
        self.messages = 0

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Its stream, from what the current one has done so far."""
        if self.stream is None:
            return contextlib.nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def mark(self) -> Any:
        """When what it has been given is done; None where it is done at once."""
        return None if self.stream is None else self.stream.record_event()


class PeerTransfers:
    """As `Transfers`. All ranks of the group must make one, and prepare it, at the same time."""

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup | None, device: torch.device):
        self._device, self._group = device, group
        self._rank = dist.get_rank(group)
        channels = sorted({action.channel for _, action in schedule if action.kind in SENDS})
        ends = {c: (schedule.rank_of[c.sender], schedule.rank_of[c.receiver]) for c in channels}
        self._ends = ends
        # On a CPU the sender itself would wait for a free box, while its receiver waits for it.
        self._boxes = BOXES if device.type == "cuda" else 2 * schedule.num_micro_batches
        self._most = max(
            (sum(end[side] == rank for end in ends.values()) for rank in range(schedule.num_ranks)
             for side in (0, 1)), default=0
        )  # fmt: skip
        self._sides: dict[Channel, Side] = {}
        self._memory: PeerMemory | None = None
        self._sent: collections.deque[tuple[Any, list[Tensor]]] = collections.deque()
        self._received: dict[Action, tuple[Callable[[], Any], list[Tensor]]] = {}

    def prepare(self, messages: Mapping[Channel, Sequence[Meta]]) -> None:
        """Makes boxes for messages of these tensors. All stages of one rank send none."""
        if not self._ends:
            return
        box_bytes = max(sum(_bytes(meta) for meta in metas) for metas in messages.values())
        boxes = self._most * self._boxes
        self._memory = peer_memory(boxes, box_bytes, 2 * boxes, self._device, self._group)
        self._sides = {}
        for channel, (sender, receiver) in self._ends.items():
            if self._rank in (sender, receiver):
                received = [c for c, end in self._ends.items() if end[1] == receiver]
                sent = [c for c, end in self._ends.items() if end[0] == sender]
                place = received.index(channel)
                self._sides[channel] = Side(
                    peer=receiver if self._rank == sender else sender,
                    place=place,
                    sent_flags=place * self._boxes,
                    free_flags=boxes + sent.index(channel) * self._boxes,
                    stream=torch.cuda.Stream(self._device) if self._device.type == "cuda" else None,
                )

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Begins to send, and keeps the tensors until they have been."""
        side, memory = self._sides[action.channel], self._ready
        box, message = side.messages % self._boxes, side.messages + 1
        side.messages += 1
        while self._sent and self._sent[0][0] is not None and self._sent[0][0].query():
            self._sent.popleft()
        whole = [tensor.detach().contiguous() for tensor in tensors]
        with side.on_stream():
            if message > self._boxes:  # the box's last message has been copied out
                memory.wait(side.free_flags + box, message - self._boxes)
            target = memory.box(side.peer, side.place * self._boxes + box)
            for tensor, place in zip(whole, _places(whole), strict=True):
                target[place : place + tensor.nbytes].view(tensor.dtype).copy_(tensor.view(-1))
            memory.tell(side.peer, side.sent_flags + box, message)
            self._sent.append((side.mark(), whole))

    def receive(self, action: Action, metas: Sequence[Meta]) -> None:
        """Begins to receive tensors of these shapes, for `take`."""
        side = self._sides[action.channel]
        box, message = side.messages % self._boxes, side.messages + 1
        side.messages += 1
        tensors = [meta.empty(self._device) for meta in metas]
        copy_out = functools.partial(self._copy_out, side, box, message, tensors)
        if side.stream is None:  # the host would wait: it does when the tensors are taken
            self._received[action] = copy_out, tensors
            return
        with side.on_stream():
            copy_out()
            event = side.stream.record_event()
        stream = torch.cuda.current_stream(self._device)
        self._received[action] = functools.partial(stream.wait_event, event), tensors

    def _copy_out(self, side: Side, box: int, message: int, tensors: Sequence[Tensor]) -> None:
        memory = self._ready
        memory.wait(side.sent_flags + box, message)
        source = memory.box(self._rank, side.place * self._boxes + box)
        for tensor, place in zip(tensors, _places(tensors), strict=True):
            tensor.view(-1).copy_(source[place : place + tensor.nbytes].view(tensor.dtype))
        memory.tell(side.peer, side.free_flags + box, message)

    def take(self, action: Action) -> list[Tensor]:
        """What was received, when it is there: on a GPU, for the current stream."""
        wait, tensors = self._received.pop(action)
        wait()
        return tensors

    def finish(self) -> None:
        """Waits for all sends."""
        for event, _ in self._sent:
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
        self._sent.clear()

    @property
    def _ready(self) -> PeerMemory:
        assert self._memory is not None, "the pipeline prepares it before the first step"
        return self._memory


def _bytes(meta: Meta) -> int:
    return round_up(meta.shape.numel() * meta.dtype.itemsize, ALIGNMENT)


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor of a message begins in its box."""
    places = [0]
    for tensor in tensors:
        places.append(places[-1] + _bytes(Meta.of(tensor)))
    return places[:-1]
