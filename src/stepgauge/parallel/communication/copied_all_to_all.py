"""All-to-all between the GPUs of one machine by copy engines, which run beside any kernel.

    y_M = copied_all_to_all(x_M, group.group_name)  # sends x_M[m] to the m-th other rank, for y_M
    wait_for(y_M)                                   # before y_M is read

NCCL's all-to-all is a kernel: next to attention, whose blocks hold all multiprocessors, it waits until
attention has ended. Here each rank writes its messages into an outbox, in memory that its peers can
reach (peer_memory.py), and the copy engines of the peers fetch them. The path of a message:

    sender, current stream    waits for the flag "free" of this outbox, writes the outbox
    sender, own stream        sets the flag "full" on the receiver
    receiver, own stream      waits for "full", copies the message into y, sets "free" on the sender
    receiver, current stream  waits for the own stream (wait_for)

Flags are 0 or 1; the stream that waits for a flag sets it back to 0. There are two outboxes, used
alternately, each with its own flags. So nothing is read or overwritten too early, however far ranks are apart.

All ranks must launch the same exchanges in the same order. The compiler keeps the order, since it takes
the operator for a collective. On one rank, exchanges must be launched from one stream, or from streams
that wait for each other.

Why there is no deadlock: each rank sets its flags "full" before it waits for those of others, in the
order of launches. So ranks proceed even if the driver serves all streams in that order, and on a CPU,
where the host does each operation at once. There is one own stream, because a GPU has one engine for
copies between GPUs, and several streams would mix up the order in which it serves the peers.

Legend: M other ranks, in the order of ranks.
"""

import datetime
import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.autograd.operators import define_operator
from stepgauge.parallel.communication.groups_by_name import group_named
from stepgauge.parallel.communication.peer_memory import in_sending_order, peer_memory, with_room

BOXES = 2
_FULL, _FREE = 0, 1


class _Outboxes:
    """The outboxes, flags and stream of a rank. All ranks of the group must create it together.

    receivers, senders  the other ranks, in the order in which flags are set
    stream              where messages are fetched; None on a CPU
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, box_bytes: int):
        self.rank, self.ranks = group.rank(), group.size()
        self.device, self.box_bytes = device, box_bytes
        self.receivers, self.senders = in_sending_order(self.rank, self.ranks)
        self.memory = peer_memory(BOXES, box_bytes, 2 * BOXES * self.ranks, device, group)
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._handle = None if self.stream is None else self.stream.cuda_stream
        self._exchanges = 0

    def exchange(self, x_M: Tensor) -> Tensor:
        """Starts an exchange of a contiguous tensor. The result must not be read before the current
        stream has waited for it.
        """
        y_M = x_M.new_empty(x_M.shape)  # first: if memory is short, no flag has been touched
        box = self._exchanges % BOXES
        if self._exchanges >= BOXES:
            self.memory.consume(tuple(self._flag(_FREE, box, rank) for rank in self.receivers))
        self._exchanges += 1
        outbox_M = self.memory.box(self.rank, box)[: x_M.nbytes].view(x_M.dtype).view(x_M.shape)
        outbox_M.copy_(x_M)
        self._begin(y_M)
        for receiver in self.receivers:
            self.memory.set_flag(receiver, self._flag(_FULL, box, self.rank), 1, self._handle)
        for sender in self.senders:
            self._fetch(sender, y_M[place_among_others(sender, of=self.rank)], box)
        self._end(y_M)
        return y_M

    def _begin(self, y_M: Tensor) -> None:
        """Makes the stream wait until the outbox is written and the memory of y is not in use."""
        if y_M.is_cuda:
            self.stream.wait_event(torch.cuda.current_stream(self.device).record_event())

    def _fetch(self, sender: int, message: Tensor, box: int) -> None:
        self.memory.consume((self._flag(_FULL, box, sender),), self._handle)
        place = place_among_others(self.rank, of=sender)
        source = self.memory.address(sender, box) + place * message.nbytes
        self.memory.copy(message.data_ptr(), source, message.nbytes, self._handle)
        self.memory.set_flag(sender, self._flag(_FREE, box, self.rank), 1, self._handle)

    def _end(self, y_M: Tensor) -> None:
        """Lets `wait_for` find the copies, and the allocator keep the memory of y until they are done."""
        if y_M.is_cuda:
            y_M.record_stream(self.stream)
            work = _Copies(self.stream.record_event())
            # The same as torch's own copied collectives do (torch.distributed._symmetric_memory). The
            # way out: a public name of it.
            torch._C._distributed_c10d._register_work(y_M, work)

    def _flag(self, kind: int, box: int, setter: int) -> int:
        """Returns the number of the flag that rank `setter` sets on another rank."""
        return (kind * BOXES + box) * self.ranks + setter


class _Copies(dist.Work):
    """Copies in flight."""

    def __init__(self, end: Any):
        super().__init__()
        self._end = end

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Makes the current stream wait. The timeout is ignored, because no host waits."""
        self._end.wait()
        return True


def place_among_others(rank: int, *, of: int) -> int:
    """Returns the index of a rank among the ranks other than rank `of`."""
    return rank - (rank > of)


_outboxes: weakref.WeakKeyDictionary[dist.ProcessGroup, _Outboxes] = weakref.WeakKeyDictionary()


def _outboxes_of(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> _Outboxes:
    return with_room(_outboxes, group, device, nbytes, _Outboxes)


def _copied_all_to_all(x_M: Tensor, group_name: str) -> Tensor:
    group = group_named(group_name)
    return _outboxes_of(group, x_M.device, x_M.nbytes).exchange(x_M)


def _fake_all_to_all(x_M: Tensor, group_name: str) -> Tensor:
    _keep_order_in_compiled_graphs()
    return x_M.new_empty(x_M.shape)


copied_all_to_all = define_operator(
    "copied_all_to_all", "(Tensor x, str group) -> Tensor", _copied_all_to_all, _fake_all_to_all
)


@functools.cache
def _keep_order_in_compiled_graphs() -> None:
    """Makes the compiler take the operator for a collective: it would reorder any other operator whose
    inputs are there. Called while a graph is traced, since eager programs need not import the compiler.
    The way out: a public tag for collectives.
    """
    from torch._inductor import ir, lowering

    def lower(x: Any, group_name: str) -> Any:
        kernel: Any = ir._CollectiveKernel.create_out_of_place(copied_all_to_all, x, group_name)
        return ir.TensorBox.create(kernel)

    lowering.add_layout_constraint(copied_all_to_all, lowering.constrain_to_fx_strides)
    lowering.register_lowering(copied_all_to_all, type_promotion_kind=None)(lower)
