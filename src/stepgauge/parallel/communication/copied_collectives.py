"""All-gather, all-to-all and send/receive between the GPUs of one machine by copy engines, to time the
transfers of overlapped tensor parallelism, exchanged heads and pipelines by themselves.

Each rank has two boxes in memory that its peers can reach (peer_memory.py), used alternately: run k uses
box k mod 2, and each box has its own flags. There are two ways:

    push  The sender copies its message into the receiver's box and sets the flag "full" there. The
          receiver waits for the flag. The result lies in the box.
    pull  The sender has its input in its own box and sets the flag "full" on the receiver. The receiver
          waits for it, copies the message out, and sets the flag "free" on the sender.

No rank sends to itself, so its own part is not in the result. Flags are 0 or 1; the stream that waits for a
flag sets it back to 0. One stream carries the messages: a GPU has one engine for copies between GPUs, and
several streams would mix up the order in which it serves the peers (all_gather of 64 MiB on four H200s took
250 us with three). It waits for the calling stream at the beginning of a run, and the calling stream waits
for it, and for all messages, at its end.

Why nothing is overwritten too early. Pull: a sender writes a box again only after the flags "free" of its
last use. Push: before a rank writes a peer's box in run k, that peer must have read the result of run k - 2.
- In all-gather and all-to-all, each rank gets a message from each other in every run. This rank has the
  peer's message of run k - 1, which the peer sent after everything it had launched before that run.
- In send/receive, a rank hears nothing from the one that it sends to. So at the beginning of a run each
  receiver sets a flag "free" on its sender for the box of the run before, whose result has been read by
  then. A sender waits for it before it writes that box again, one run later.
The same holds for the flags: none is set again before it has been cleared.

Why there is no deadlock. In a run, each rank launches its own messages before it waits for those of
others, and a push waits only for a flag that its receiver has set in the run before.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.peer_memory import ALIGNMENT, in_sending_order, peer_memory
from stepgauge.spec.units import round_up

BOXES = 2
_FULL, _FREE = 0, 1


class CopiedCollective:
    """A collective that all ranks of a group run again and again. All ranks must create it together, and
    must run it equally often, on one stream or on streams that wait for each other.

    operation  all_gather, all_to_all or send_recv
    count      number of elements of the whole operation, a multiple of the ranks: the output of all_gather
    pulls      receivers fetch the messages, instead of senders writing them
    """

    def __init__(
        self,
        operation: str,
        count: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        pulls: bool = False,
    ):
        self._operation, self._pulls, self._device = operation, pulls, device
        self._rank, self._ranks = group.rank(), group.size()
        self._set_peers()
        self._message = count if operation == "send_recv" else count // self._ranks
        sent = self._message if operation == "all_gather" else count
        in_box, outside = (sent, count) if pulls else (count, sent)
        self._nbytes = self._message * dtype.itemsize
        box_bytes = round_up(in_box * dtype.itemsize, ALIGNMENT)
        flags = 2 * BOXES * self._ranks
        self._memory = peer_memory(BOXES, box_bytes, flags, device, group)
        self._boxes = [
            self._memory.box(self._rank, box)[: in_box * dtype.itemsize].view(dtype)
            for box in range(BOXES)
        ]
        self._outside = torch.empty(outside, dtype=dtype, device=device)
        outputs = [self._outside] * BOXES if pulls else self._boxes
        self._results = [self._by_sender(output) for output in outputs]
        self._runs, self._open = 0, -1
        self._set_streams()

    def _set_peers(self) -> None:
        """Lists the ranks to which this rank sends, and those that send to it."""
        self._receivers, self._senders = in_sending_order(self._rank, self._ranks)
        self._acknowledges = False
        if self._operation == "send_recv":  # to the right neighbour only
            del self._receivers[1:], self._senders[1:]
            self._acknowledges = not self._pulls

    def _set_streams(self) -> None:
        self._stream: Any = None  # of the messages
        self._replies: Any = None  # of the flags "free" of a push
        self._current: Any = None  # the calling stream of the last run
        self._ends: dict[Any, Any] = {}  # stream: the event at the end of its work
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
            self._replies = torch.cuda.Stream(self._device) if self._acknowledges else None
            streams = [self._stream, self._replies] if self._acknowledges else [self._stream]
            self._ends = {stream: torch.cuda.Event() for stream in streams}
            self._begin = torch.cuda.Event()
            self._current = torch.cuda.current_stream(self._device)

    def _by_sender(self, output: Tensor) -> dict[int, Tensor]:
        return {
            sender: output[self._place_in_output(sender) :][: self._message]
            for sender in self._senders
        }

    def _place_in_input(self, receiver: int) -> int:
        """Returns the first element of the message for a rank."""
        return receiver * self._message if self._operation == "all_to_all" else 0

    def _place_in_output(self, sender: int) -> int:
        return 0 if self._operation == "send_recv" else sender * self._message

    def input(self) -> Tensor:
        """Returns what the next run will send, to be written on the current stream. It has one part in
        all_gather, a part for each rank in all_to_all.
        """
        if not self._pulls:
            return self._outside
        self._enter()
        self._wait_until_free()
        return self._boxes[self._runs % BOXES]

    def run(self) -> dict[int, Tensor]:
        """Returns, by sender, what this rank has received. The current stream waits for it. It must be
        read on this stream, before the next run.
        """
        self._enter()
        box = self._runs % BOXES
        if self._pulls:
            self._pull(box)
        else:
            self._push(box)
        self._runs += 1
        return self._results[box]

    def _push(self, box: int) -> None:
        memory, rank, stream = self._memory, self._rank, _handle(self._stream)
        self._fork()
        if self._acknowledges and self._runs:
            read = self._flag(_FREE, (self._runs - 1) % BOXES, rank)
            memory.set_flag(self._senders[0], read, 1, _handle(self._replies))
        for receiver in self._receivers:
            if self._acknowledges and self._runs >= BOXES:
                memory.consume((self._flag(_FREE, box, receiver),), stream)
            target = memory.address(receiver, box), self._place_in_output(rank)
            source = self._outside.data_ptr(), self._place_in_input(receiver)
            self._copy(target, source, stream)
            memory.set_flag(receiver, self._flag(_FULL, box, rank), 1, stream)
        self._join()
        memory.consume(tuple(self._flag(_FULL, box, sender) for sender in self._senders))

    def _pull(self, box: int) -> None:
        memory, rank, stream = self._memory, self._rank, _handle(self._stream)
        self._wait_until_free()
        self._fork()
        for receiver in self._receivers:
            memory.set_flag(receiver, self._flag(_FULL, box, rank), 1, stream)
        for sender in self._senders:
            memory.consume((self._flag(_FULL, box, sender),), stream)
            target = self._outside.data_ptr(), self._place_in_output(sender)
            source = memory.address(sender, box), self._place_in_input(rank)
            self._copy(target, source, stream)
            memory.set_flag(sender, self._flag(_FREE, box, rank), 1, stream)
        self._join()

    def _copy(self, target: tuple[int, int], source: tuple[int, int], stream: int | None) -> None:
        """Copies a message. Both ends are an address and a number of elements after it."""
        itemsize = self._outside.itemsize
        to, start = (address + place * itemsize for address, place in (target, source))
        self._memory.copy(to, start, self._nbytes, stream)

    def _wait_until_free(self) -> None:
        """Makes the calling stream wait, once in a pull, until all receivers have read the next box."""
        if self._runs >= BOXES and self._open < self._runs:
            box = self._runs % BOXES
            self._memory.consume(tuple(self._flag(_FREE, box, each) for each in self._receivers))
        self._open = self._runs

    def _enter(self) -> None:
        """Makes the calling stream wait for that of the last run, if it is another one."""
        if self._current is not None:
            current = torch.cuda.current_stream(self._device)
            if current != self._current:
                current.wait_stream(self._current)
                self._current = current

    def _fork(self) -> None:
        """Makes the other streams wait for the work launched so far on the calling stream."""
        if self._current is not None:
            self._begin.record(self._current)
            for stream in self._ends:
                stream.wait_event(self._begin)

    def _join(self) -> None:
        """Makes the calling stream wait for the others."""
        if self._current is not None:
            for stream, end in self._ends.items():
                end.record(stream)
                self._current.wait_event(end)

    def _flag(self, kind: int, box: int, setter: int) -> int:
        """Returns the number of the flag that rank `setter` sets on another rank."""
        return (kind * BOXES + box) * self._ranks + setter


def _handle(stream: Any) -> int | None:
    return None if stream is None else stream.cuda_stream
