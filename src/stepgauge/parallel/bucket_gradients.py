"""The gradients of a bucket as a message: pack, cast, send, unpack.

`.grad` itself is sent and averaged in place where nobody else can see its memory. What is packed,
cast to another type, or missing here, is sent as a copy, and its mean written into `.grad`.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from stepgauge.parallel.reducer import Done, GradientReducer, Launched


class BucketGradients:
    """The gradients of some parameters of one type and device, on their way to their mean.

    own     parameters whose `.grad` on this rank is a part of the mean: those that backward added
            to. The `.grad` of another is taken to be alike on all ranks, and is sent as it is, so
            that it stays; a missing one counts as zero
    dtype   what is sent; None: the gradients' own
    packs   whether the gradients are copied behind each other
    owner   the rank that alone gets the mean. It adds it to a `.grad` that is not `own`, and the
            others have none of it afterwards
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        own: set[nn.Parameter],
        *,
        dtype: torch.dtype | None = None,
        packs: bool = False,
        owner: int | None = None,
    ):
        self.parameters, self.own, self.owner = parameters, own, owner
        self.work: Launched = Done()
        self._dtype = dtype or parameters[0].dtype
        # parameters whose mean is not in `.grad` but here
        self.copies: dict[nn.Parameter, Tensor] = {}
        gradients = [self._contribution(parameter) for parameter in parameters]
        self.tensors = self._packed(gradients) if packs else self._listed(gradients)

    def send(self, reducer: GradientReducer) -> Launched:
        self.work = (
            reducer.launch_list(self.tensors)
            if len(self.tensors) > 1
            else reducer.launch(self.tensors[0], owner=self.owner)
        )
        return self.work

    def unpack(self, unused: Collection[nn.Parameter], *, rank: int) -> None:
        """Gives each parameter its mean, once the message has arrived.

        unused  parameters that no rank had a gradient of: they stay as they are
        """
        for parameter in self.parameters:
            if parameter in unused:
                continue
            if self.owner not in (None, rank):
                parameter.grad = None
            elif (mean := self.copies.get(parameter)) is None:
                continue
            elif parameter.grad is None:
                parameter.grad = mean.to(parameter.dtype, copy=True)
            elif self.owner is not None and parameter not in self.own:
                parameter.grad.add_(mean)
            else:
                parameter.grad.copy_(mean)
        self.copies, self.tensors = {}, []

    def _contribution(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise ValueError(
                f"a gradient of shape {tuple(parameter.shape)} is sparse; only dense ones are "
                f"averaged"
            )
        counts = parameter in self.own or self.owner is None
        return gradient if counts else None

    def _in_place(self, parameter: nn.Parameter, gradient: Tensor | None) -> bool:
        return (
            gradient is not None
            and parameter in self.own
            and gradient.dtype == self._dtype
            and is_alone(parameter.grad)
        )

    def _listed(self, gradients: list[Tensor | None]) -> list[Tensor]:
        listed = []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if not self._in_place(parameter, gradient):
                gradient = self.copies[parameter] = self._copied(parameter, gradient)
            assert gradient is not None, "it is there or was made"
            listed.append(gradient)
        return listed

    def _copied(self, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
        layout = torch.contiguous_format
        if gradient is None:
            return torch.zeros_like(parameter, dtype=self._dtype, memory_format=layout).detach()
        return gradient.to(self._dtype, copy=True, memory_format=layout)

    def _packed(self, gradients: list[Tensor | None]) -> list[Tensor]:
        counts = [parameter.numel() for parameter in self.parameters]
        flat = torch.empty(sum(counts), dtype=self._dtype, device=self.parameters[0].device)
        for parameter, gradient, part in zip(
            self.parameters, gradients, flat.split(counts), strict=True
        ):
            part = part.view(parameter.shape)
            alone = self._in_place(parameter, gradient)
            part.zero_() if gradient is None else part.copy_(gradient)
            if alone:  # and so it is seen only through `.grad`, which moves here
                parameter.grad.data = part  # type: ignore[union-attr]
            else:
                self.copies[parameter] = part
        return [flat]


def is_alone(gradient: Tensor | None) -> bool:
    """Whether the gradient is contiguous and nothing else uses its memory.

    Autograd may give two parameters gradients that share a storage (of `a.view(-1) + b.view(-1)`,
    say), or read one again after it gave it; averaging one of those in place would change the
    other.
    """
    if gradient is None or not gradient.is_contiguous():
        return False
    storage = gradient.untyped_storage()
    # Two users: the gradient, and the object `storage`. Packing all gradients instead took 6.3 ms of
    # a step of 155 ms (docs/data-parallel.md). The way out: a public function that counts users.
    return storage.nbytes() == gradient.nbytes and torch._C._storage_Use_Count(storage._cdata) <= 2
