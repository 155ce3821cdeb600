"""The gradients of a bucket on their way to their mean: pack, cast, send, unpack.

`.grad` itself is sent and averaged in place where nobody else can see its memory. What is packed,
cast to another type, or missing here, is sent as a copy, and its mean written into `.grad`.
"""

from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.reducer import GradientReducer, require_dense
from stepgauge.parallel.data_parallel.readiness import Averaged


class BucketGradients:
    """The gradients of some parameters of one type and device.

    A gradient that backward has not added to on this rank is taken to be alike on all ranks that
    have it, and stays; a missing one counts as zero.

    dtype   what is sent
    packs   whether the gradients are copied behind each other
    """

    def __init__(
        self,
        members: Sequence[Averaged],
        reducer: GradientReducer,
        *,
        dtype: torch.dtype,
        packs: bool = False,
    ):
        self.members, self.reducer = members, reducer
        self.work: dist.Work | None = None
        self._dtype = dtype
        # by member, the mean that is not in `.grad` but here
        self.copies: list[Tensor | None] = []
        if packs:
            counts = [member.parameter.numel() for member in members]
            flat = members[0].parameter.new_empty(sum(counts), dtype=dtype)
            for member, part in zip(members, flat.split(counts), strict=True):
                self._place(member, part.view(member.parameter.shape))
        self.tensors = [flat] if packs else [self._place(member) for member in members]

    def send(self) -> None:
        self.work = self.launch()

    def launch(self) -> dist.Work:
        return self.reducer.launch(self.tensors)

    def wait(self) -> None:
        """Until what is computed next sees the means; on a GPU the host goes on."""
        if self.work is not None:
            self.work.wait()

    def unpack(self, unused: Container[int] = ()) -> None:
        """Waits, and gives each parameter its mean. Those that no rank used stay as they are."""
        self.wait()
        for member, mean in zip(self.members, self.copies, strict=True):
            if member.number not in unused:
                self.give_mean(member, mean)

    def give_mean(self, member: Averaged, mean: Tensor | None) -> None:
        """mean: None where it is in `.grad` already."""
        parameter = member.parameter
        if parameter.grad is None:
            assert mean is not None, "a gradient that is not there was sent as a copy"
            parameter.grad = mean.to(parameter.dtype, copy=True)
        elif mean is not None:
            parameter.grad.copy_(mean)

    def _place(self, member: Averaged, part: Tensor | None = None) -> Tensor:
        """What is sent of a gradient: a part of a flat message, `.grad` itself where it can be
        averaged in place, or a copy.
        """
        parameter = member.parameter
        gradient = parameter.grad
        if gradient is not None:
            require_dense(gradient)
        if gradient is not None and not (
            member.is_local and gradient.dtype == self._dtype and is_alone(gradient)
        ):
            gradient = None
        if gradient is not None and part is None:
            self.copies.append(None)
            return gradient
        part = parameter.new_empty(parameter.shape, dtype=self._dtype) if part is None else part
        self.fill(part, member)
        if gradient is not None:
            gradient.data = part  # it is seen only through `.grad`
        self.copies.append(None if gradient is not None else part)
        return part

    def fill(self, part: Tensor, member: Averaged) -> Tensor:
        """What this rank adds to the mean, written into the part."""
        gradient = member.parameter.grad
        return part.zero_() if gradient is None else part.copy_(gradient)


def is_alone(gradient: Tensor) -> bool:
    """Whether the gradient is contiguous and nothing else uses its memory.

    Autograd may give two parameters gradients that share a storage (of `a.view(-1) + b.view(-1)`,
    say), or read one again after it gave it; averaging one of those in place would change the
    other.
    """
    if not gradient.is_contiguous():
        return False
    storage = gradient.untyped_storage()
    # Two users: the gradient, and the object `storage`. Packing all gradients instead took 6.3 ms of
    # a step of 155 ms (docs/data-parallel.md). The way out: a public function that counts users.
    return storage.nbytes() == gradient.nbytes and torch._C._storage_Use_Count(storage._cdata) <= 2
