"""The gradients of a bucket on their way to their mean: pack, cast, send, unpack.

`.grad` itself is sent and averaged in place where nobody else can see its memory. What is packed,
cast to another type, or missing here, is sent as a copy, and its mean written into `.grad`. All ranks
get the mean, or the bucket's owner alone, and the others have no gradient then.
"""

from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.collectives import launch_together
from stepgauge.parallel.reducer import GradientReducer
from stepgauge.parallel.shares import as_share


class BucketGradients:
    """The gradients of some parameters of one type and device.

    own     parameters whose `.grad` backward has added to on this rank. The `.grad` of another is
            taken to be alike on all ranks that have it, and stays; a missing one counts as zero
    dtype   what is sent
    packs   whether the gradients are copied behind each other
    owner   the rank that alone gets the mean, in one packed message; None: all do
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        own: Container[nn.Parameter],
        reducer: GradientReducer,
        *,
        dtype: torch.dtype,
        packs: bool = False,
        owner: int | None = None,
    ):
        self.parameters, self.reducer, self.owner = parameters, reducer, owner
        self.work: dist.Work | None = None
        self.own, self._dtype = own, dtype
        # parameters whose mean is not in `.grad` but here
        self.copies: dict[nn.Parameter, Tensor] = {}
        if packs or (owner is not None and len(parameters) > 1):
            counts = [parameter.numel() for parameter in parameters]
            flat = parameters[0].new_empty(sum(counts), dtype=dtype)
            for parameter, part in zip(parameters, flat.split(counts), strict=True):
                self._place(parameter, part.view(parameter.shape))
            self.tensors = [flat]
        else:
            self.tensors = [self._place(parameter) for parameter in parameters]

    def launch(self) -> dist.Work:
        if self.owner is None:
            return self.reducer.launch(self.tensors)
        return self.reducer.launch_to(self.owner, self.tensors[0])

    def wait(self) -> None:
        """Until what is computed next sees the means; on a GPU the host goes on."""
        if self.work is not None:
            self.work.wait()

    def unpack(self, unused: Container[nn.Parameter] = ()) -> None:
        """Waits, and gives each parameter its mean. Those that no rank used stay as they are."""
        self.wait()
        for parameter in self.parameters:
            if parameter not in unused:
                self._give_mean(parameter)

    def has_arrived(self) -> bool:
        return self.work is None or self.work.is_completed()

    def can_be_unpacked_early(self) -> bool:
        """Whether backward, which goes on, reads nothing that is written, and some rank, this one,
        has a gradient of each.
        """
        return all(
            p in self.own and (p not in self.copies or p.grad is None or is_alone(p.grad))
            for p in self.parameters
        )

    def _give_mean(self, parameter: nn.Parameter) -> None:
        if self.owner not in (None, self.reducer.rank):
            parameter.grad = None
            return
        mean = self.copies.get(parameter)
        if parameter.grad is None:
            assert mean is not None, "a gradient that is not there was sent as a copy"
            parameter.grad = mean.to(parameter.dtype, copy=True)
        elif mean is not None:
            parameter.grad.copy_(mean)
        if self.owner is not None:
            parameter.grad = as_share(parameter.grad)

    def _place(self, parameter: nn.Parameter, part: Tensor | None = None) -> Tensor:
        """What is sent of a gradient: a part of a flat message, `.grad` itself where it can be
        averaged in place, or a copy.
        """
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            shape = tuple(parameter.shape)
            raise ValueError(f"a gradient of shape {shape} is sparse; only dense ones are averaged")
        if gradient is not None and not (
            parameter in self.own and gradient.dtype == self._dtype and is_alone(gradient)
        ):
            gradient = None
        if gradient is not None and part is None:
            return gradient
        part = parameter.new_empty(parameter.shape, dtype=self._dtype) if part is None else part
        self._fill(part, parameter)
        if gradient is not None:
            gradient.data = part  # it is seen only through `.grad`
        else:
            self.copies[parameter] = part
        return part

    def _fill(self, part: Tensor, parameter: nn.Parameter) -> None:
        """What this rank adds to the mean. What backward has not added to is alike on all ranks, or
        the owner's alone: its counts for all then.
        """
        is_owners = self.owner is not None and parameter not in self.own
        if parameter.grad is None or (is_owners and self.owner != self.reducer.rank):
            part.zero_()
        else:
            part.copy_(parameter.grad)
            if is_owners:
                part.mul_(self.reducer.ranks)


class Launch:
    """Buckets that are sent at once: of different owners, or one for all ranks."""

    def __init__(self, buckets: Sequence[BucketGradients]):
        self.buckets = buckets

    def send(self) -> None:
        first = self.buckets[0]
        works = launch_together(
            [bucket.launch for bucket in self.buckets],
            group=first.reducer.group,
            device=first.parameters[0].device,
        )
        for bucket, work in zip(self.buckets, works, strict=True):
            bucket.work = work

    def wait(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    def unpack(self, unused: Container[nn.Parameter] = ()) -> None:
        for bucket in self.buckets:
            bucket.unpack(unused)


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
