"""Sends the gradients of a bucket and stores their means in `.grad`.

A gradient is averaged in place if nothing else uses its memory. A gradient that is packed, cast to
another dtype or missing on this rank is sent as a copy, from which its mean is copied to `.grad`.
"""

from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.reducer import GradientReducer, require_dense
from stepgauge.parallel.data_parallel.readiness import TrackedParameter


class BucketGradients:
    """The gradients of some parameters of one dtype and device, on their way to their means.

    A `.grad` to which backward has not added on this rank is assumed to be equal on all ranks that
    have it, so averaging leaves it as it is. A missing gradient counts as zero.

    dtype  in which the gradients are sent
    packs  copies the gradients one after another into one flat tensor

    members  the parameters
    copies   for each parameter, the tensor that gets its mean; None if that is `.grad` itself
    tensors  to send: the flat tensor, or one for each parameter
    """

    def __init__(
        self,
        members: Sequence[TrackedParameter],
        reducer: GradientReducer,
        *,
        dtype: torch.dtype,
        packs: bool = False,
    ):
        self.members, self.reducer = members, reducer
        self.work: dist.Work | None = None
        self._dtype = dtype
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
        """Waits for the means. On a GPU the current stream waits, and the host does not."""
        if self.work is not None:
            self.work.wait()

    def unpack(self, unused: Container[int] = ()) -> None:
        """Waits, then stores the means in `.grad`. Parameters that no rank used keep theirs."""
        self.wait()
        for member, mean in zip(self.members, self.copies, strict=True):
            if member.number not in unused:
                self.store_mean(member, mean)

    def store_mean(self, member: TrackedParameter, mean: Tensor | None) -> None:
        """Copies the mean to `.grad`; None means that it is there already."""
        parameter = member.parameter
        if parameter.grad is None:
            assert mean is not None, "a missing gradient is sent as a copy"
            parameter.grad = mean.to(parameter.dtype, copy=True)
        elif mean is not None:
            parameter.grad.copy_(mean)

    def _place(self, member: TrackedParameter, part: Tensor | None = None) -> Tensor:
        """Returns the tensor to send for a parameter: its part of the flat tensor if packed, else
        `.grad` itself if it can be averaged in place, else a copy.
        """
        gradient = member.parameter.grad
        if gradient is None or not self._can_be_averaged_in_place(gradient, member):
            if part is None:
                part = member.parameter.new_empty(member.parameter.shape, dtype=self._dtype)
            self.copies.append(part)
            return self.fill(part, member)
        self.copies.append(None)
        if part is None:
            return gradient
        self.fill(part, member)
        gradient.data = part  # only `.grad` used the old memory
        return part

    def _can_be_averaged_in_place(self, gradient: Tensor, member: TrackedParameter) -> bool:
        require_dense(gradient)
        has_right_dtype = gradient.dtype == self._dtype
        return member.is_unreduced and has_right_dtype and owns_memory(gradient)

    def fill(self, part: Tensor, member: TrackedParameter) -> Tensor:
        """Writes what this rank contributes to the mean into `part`, and returns `part`."""
        gradient = member.parameter.grad
        return part.zero_() if gradient is None else part.copy_(gradient)


def owns_memory(gradient: Tensor) -> bool:
    """Returns True if the gradient is contiguous and nothing else uses its memory.

    Autograd may give two parameters gradients that share a storage (`a.view(-1) + b.view(-1)` does),
    or may read a gradient again after it gave it to a parameter. Averaging such a gradient in place
    would change the other one.
    """
    if not gradient.is_contiguous():
        return False
    storage = gradient.untyped_storage()
    # Two users: the gradient and the Python object `storage`. Packing all gradients instead took
    # 6.3 ms of a step of 155 ms (docs/log/2026-11-22-data-parallel.md).
    # The way out: a public function that counts the users of a storage.
    return storage.nbytes() == gradient.nbytes and torch._C._storage_Use_Count(storage._cdata) <= 2
