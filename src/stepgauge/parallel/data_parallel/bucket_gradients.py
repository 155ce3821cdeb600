"""The gradients of a bucket on their way to their mean: pack, cast, send, unpack.

`.grad` itself is sent and averaged in place where nobody else can see its memory. What is packed,
cast to another type, or missing here, is sent as a copy, and its mean written into `.grad`.
"""

from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.communication.reducer import GradientReducer, require_dense


class BucketGradients:
    """The gradients of some parameters of one type and device.

    own     parameters whose `.grad` backward has added to on this rank. The `.grad` of another is
            taken to be alike on all ranks that have it, and stays; a missing one counts as zero
    dtype   what is sent
    packs   whether the gradients are copied behind each other
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        own: Container[nn.Parameter],
        reducer: GradientReducer,
        *,
        dtype: torch.dtype,
        packs: bool = False,
    ):
        self.parameters, self.own, self.reducer = parameters, own, reducer
        self.work: dist.Work | None = None
        self._dtype = dtype
        # parameters whose mean is not in `.grad` but here
        self.copies: dict[nn.Parameter, Tensor] = {}
        if packs:
            counts = [parameter.numel() for parameter in parameters]
            flat = parameters[0].new_empty(sum(counts), dtype=dtype)
            for parameter, part in zip(parameters, flat.split(counts), strict=True):
                self._place(parameter, part.view(parameter.shape))
        self.tensors = [flat] if packs else [self._place(parameter) for parameter in parameters]

    def send(self) -> None:
        self.work = self.launch()

    def launch(self) -> dist.Work:
        return self.reducer.launch(self.tensors)

    def wait(self) -> None:
        """Until what is computed next sees the means; on a GPU the host goes on."""
        if self.work is not None:
            self.work.wait()

    def unpack(self, unused: Container[nn.Parameter] = ()) -> None:
        """Waits, and gives each parameter its mean. Those that no rank used stay as they are."""
        self.wait()
        for parameter in self.parameters:
            if parameter not in unused:
                self.give_mean(parameter)

    def give_mean(self, parameter: nn.Parameter) -> None:
        mean = self.copies.get(parameter)
        if parameter.grad is None:
            assert mean is not None, "a gradient that is not there was sent as a copy"
            parameter.grad = mean.to(parameter.dtype, copy=True)
        elif mean is not None:
            parameter.grad.copy_(mean)

    def _place(self, parameter: nn.Parameter, part: Tensor | None = None) -> Tensor:
        """What is sent of a gradient: a part of a flat message, `.grad` itself where it can be
        averaged in place, or a copy.
        """
        gradient = parameter.grad
        if gradient is not None:
            require_dense(gradient)
        if gradient is not None and not (
            parameter in self.own and gradient.dtype == self._dtype and is_alone(gradient)
        ):
            gradient = None
        if gradient is not None and part is None:
            return gradient
        part = parameter.new_empty(parameter.shape, dtype=self._dtype) if part is None else part
        self.fill(part, parameter)
        if gradient is not None:
            gradient.data = part  # it is seen only through `.grad`
        else:
            self.copies[parameter] = part
        return part

    def fill(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """What this rank adds to the mean, written into the part."""
        return part.zero_() if parameter.grad is None else part.copy_(parameter.grad)


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
