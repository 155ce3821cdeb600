"""Sends tensors between stages on ranks of one machine, as copies into the receiver's memory.

On GPUs the copy engines move the bytes. Each channel has a few boxes, buffers of fixed size, in the
memory of its receiver, and uses them in turn. The sender waits until the next box is free, copies
its tensors into it and sets a flag on the receiver. The receiver waits for that flag, copies the
tensors out and sets a flag on the sender: the box is free again. Each end of a channel has its own
stream, so computation only waits for the tensors that it reads.

The copies are calls of the driver with addresses. Views of the boxes and torch's copies would take
the host longer than the GPU needs for a small micro-batch.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.peer_memory import ALIGNMENT, PeerMemory, peer_memory
from stepgauge.parallel.pipeline.interfaces import Meta, as_bytes
from stepgauge.spec.plan.pipeline import Action, Channel, Schedule
from stepgauge.spec.plan.pipeline.action import SENDS
from stepgauge.spec.units import round_up

BOXES = 3  # per channel on a GPU: one is read, one is full, one is written


class ChannelEnd:
    """This rank's end of a channel, for sending or for receiving.

    peer        rank at the other end
    receiver    rank that has the boxes
    first_box   first of the channel's boxes on the receiver. The flag that says that a box is full is
                on the receiver too, and has the number of the box
    free_flags  first of the flags on the sender that say that a box is free
    stream      where the copies run; None on a CPU
    messages    number of messages so far
    """

    def __init__(self, peer: int, receiver: int, first_box: int, free_flags: int, stream: Any):
        self.peer, self.receiver = peer, receiver
        self.first_box, self.free_flags = first_box, free_flags
        self.stream, self.messages = stream, 0
        self.handle, self._begin = None, None
        if stream is not None:
            self.handle, self._begin = stream.cuda_stream, torch.cuda.Event()

    def follow(self) -> None:
        """Makes this end's stream wait for the work launched so far on the current stream."""
        if self._begin is not None:
            self._begin.record(torch.cuda.current_stream(self.stream.device))
            self.stream.wait_event(self._begin)

    def record_event(self) -> Any:
        """Returns an event at the end of the launched work; None on a CPU, where it is done."""
        return None if self.stream is None else self.stream.record_event()


class PeerTransfers:
    """The sends and receives of this rank, with the same methods as `Transfers`.

    All ranks of the group must create one, and prepare it, at the same time.
    """

    can_restart = True  # after a step that raised, by preparing it again

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup | None, device: torch.device):
        self._device, self._group = device, group
        self._rank = dist.get_rank(group)
        channels = sorted({action.channel for _, action in schedule if action.kind in SENDS})
        self._ranks = {
            channel: (schedule.rank_of[channel.sender], schedule.rank_of[channel.receiver])
            for channel in channels
        }
        # A CPU has no streams: a sender that waited for a free box would block its whole rank, which
        # the receiver may be waiting for. So there are boxes for the messages of two steps.
        self._boxes = BOXES if device.type == "cuda" else 2 * schedule.num_micro_batches
        # the most channels that any rank sends on, or receives on
        self._max_channels = max(
            (
                sum(pair[side] == rank for pair in self._ranks.values())
                for rank in range(schedule.num_ranks)
                for side in (0, 1)
            ),
            default=0,
        )
        self._ends: dict[Channel, ChannelEnd] = {}
        self._memory: PeerMemory | None = None
        self._sent: collections.deque[tuple[Any, list[Tensor]]] = collections.deque()
        self._received: dict[Action, tuple[Callable[[], Any], list[Tensor]]] = {}

    def prepare(self, messages: Mapping[Channel, Sequence[Meta]]) -> None:
        """Allocates boxes for messages of these tensors; nothing if all stages are on one rank."""
        if not self._ranks:
            return
        box_bytes = max(sum(_padded_bytes(meta) for meta in metas) for metas in messages.values())
        num_boxes = self._max_channels * self._boxes
        self._memory = peer_memory(num_boxes, box_bytes, 2 * num_boxes, self._device, self._group)
        self._ends = {}
        for channel, (sender, receiver) in self._ranks.items():
            if self._rank in (sender, receiver):
                into_receiver = [c for c, pair in self._ranks.items() if pair[1] == receiver]
                from_sender = [c for c, pair in self._ranks.items() if pair[0] == sender]
                self._ends[channel] = ChannelEnd(
                    peer=receiver if self._rank == sender else sender,
                    receiver=receiver,
                    first_box=into_receiver.index(channel) * self._boxes,
                    free_flags=num_boxes + from_sender.index(channel) * self._boxes,
                    stream=torch.cuda.Stream(self._device) if self._device.type == "cuda" else None,
                )

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Starts to send the tensors, and keeps them alive until they have been sent."""
        end, memory = self._ends[action.channel], self._prepared_memory
        box, message = end.messages % self._boxes, end.messages + 1
        end.messages += 1
        while self._sent and self._sent[0][0] is not None and self._sent[0][0].query():
            self._sent.popleft()
        contiguous = [as_bytes(tensor) for tensor in tensors]
        end.follow()
        if message > self._boxes:  # wait until the box's previous message has been copied out
            memory.wait(end.free_flags + box, message - self._boxes, end.handle)
        for tensor, address in self._in_box(end, box, contiguous):
            memory.copy(address, tensor.data_ptr(), tensor.nbytes, end.handle)
        memory.set_flag(end.peer, end.first_box + box, message, end.handle)
        self._sent.append((end.record_event(), contiguous))

    def receive(self, action: Action, metas: Sequence[Meta]) -> None:
        """Starts to receive tensors of these shapes; `take` returns them."""
        end = self._ends[action.channel]
        box, message = end.messages % self._boxes, end.messages + 1
        end.messages += 1
        tensors = [meta.empty(self._device) for meta in metas]
        copy_out = functools.partial(self._copy_out, end, box, message, tensors)
        if end.stream is None:  # copying would block the host, so `take` does it
            self._received[action] = copy_out, tensors
            return
        end.follow()
        copy_out()
        event = end.record_event()
        stream = torch.cuda.current_stream(self._device)
        self._received[action] = functools.partial(stream.wait_event, event), tensors

    def _copy_out(self, end: ChannelEnd, box: int, message: int, tensors: Sequence[Tensor]) -> None:
        memory = self._prepared_memory
        memory.wait(end.first_box + box, message, end.handle)
        for tensor, address in self._in_box(end, box, tensors):
            memory.copy(tensor.data_ptr(), address, tensor.nbytes, end.handle)
        memory.set_flag(end.peer, end.free_flags + box, message, end.handle)

    def _in_box(
        self, end: ChannelEnd, box: int, tensors: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, int]]:
        """Yields the tensors of a message that have bytes, each with its address in the box."""
        address = self._prepared_memory.address(end.receiver, end.first_box + box)
        for tensor in tensors:
            if tensor.nbytes:
                yield tensor, address
            address += round_up(tensor.nbytes, ALIGNMENT)

    def take(self, action: Action) -> list[Tensor]:
        """Waits for the received tensors and returns them. On a GPU the current stream waits."""
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
    def _prepared_memory(self) -> PeerMemory:
        assert self._memory is not None, "the pipeline calls prepare before the first step"
        return self._memory


def _padded_bytes(meta: Meta) -> int:
    return round_up(meta.shape.numel() * meta.dtype.itemsize, ALIGNMENT)
