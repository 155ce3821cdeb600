"""The gradients of a bucket on their way to their mean: pack, cast, send, unpack.

`.grad` itself is sent and averaged in place where nobody else can see its memory. What is packed,
cast to another type, or missing here, is sent as a copy, and its mean written into `.grad`.
"""

from collections.abc import Container, Sequence

import torch
from torch import Tensor, nn

from stepgauge.parallel.reducer import Done, GradientReducer, Launched
from stepgauge.parallel.shares import as_share


class BucketGradients:
    """The gradients of some parameters of one type and device.

    own     parameters whose `.grad` backward has added to on this rank. The `.grad` of another is
            taken to be alike on all ranks that have it, and stays; a missing one counts as zero
    dtype   what is sent; None: the gradients' own
    packs   whether the gradients are copied behind each other
    owner   the rank that alone gets the mean; the others have none of it afterwards
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        own: Container[nn.Parameter],
        reducer: GradientReducer,
        *,
        dtype: torch.dtype | None = None,
        packs: bool = False,
        owner: int | None = None,
    ):
        self.parameters, self.owner = parameters, owner
        self.is_complete = all(parameter in own for parameter in parameters)
        self.work: Launched = Done()
        self._own, self._reducer, self._dtype = own, reducer, dtype or parameters[0].dtype
        # parameters whose mean is not in `.grad` but here
        self._copies: dict[nn.Parameter, Tensor] = {}
        self.tensors = self._packed() if packs else [self._contribution(p) for p in parameters]

    def send(self) -> Launched:
        self.work = (
            self._reducer.launch_list(self.tensors)
            if len(self.tensors) > 1
            else self._reducer.launch(self.tensors[0], owner=self.owner)
        )
        return self.work

    def can_be_unpacked_early(self) -> bool:
        """Whether that frees memory, and backward, which goes on, reads nothing that it writes. No
        rank can lack all gradients of a bucket that is complete here.
        """
        frees = bool(self._copies) or self.owner is not None
        is_read = any(p.grad is not None and not is_alone(p.grad) for p in self._copies)
        return self.is_complete and frees and not is_read

    @torch.no_grad()
    def unpack(self, unused: Container[nn.Parameter] = ()) -> None:
        """Waits, and gives each parameter its mean.

        unused  parameters that no rank had a gradient of: they stay as they are
        """
        self.work.wait()
        for parameter in self.parameters:
            if parameter in unused:
                continue
            if self.owner not in (None, self._reducer.rank):
                parameter.grad = None
                continue
            mean = self._copies.get(parameter)
            if parameter.grad is None:
                assert mean is not None, "a gradient that is not there was sent as a copy"
                parameter.grad = mean.to(parameter.dtype, copy=True)
            elif mean is not None:
                parameter.grad.copy_(mean)
            if self.owner is not None:
                parameter.grad = as_share(parameter.grad)

    def _contribution(self, parameter: nn.Parameter) -> Tensor:
        """`.grad` itself where it can be averaged in place, else a copy of it."""
        gradient = parameter.grad
        if self._is_in_place(parameter):
            assert gradient is not None, "it is in place"
            return gradient
        copied = torch.empty_like(
            parameter, dtype=self._dtype, memory_format=torch.contiguous_format
        )
        self._copies[parameter] = self._fill(copied.detach(), parameter)
        return self._copies[parameter]

    def _packed(self) -> list[Tensor]:
        counts = [parameter.numel() for parameter in self.parameters]
        flat = self.parameters[0].new_empty(sum(counts), dtype=self._dtype)
        for parameter, part in zip(self.parameters, flat.split(counts), strict=True):
            in_place = self._is_in_place(parameter)
            part = self._fill(part.view(parameter.shape), parameter)
            if in_place:  # and so it is seen only through `.grad`, which moves here
                parameter.grad.data = part  # type: ignore[union-attr]
            else:
                self._copies[parameter] = part
        return [flat]

    def _fill(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            return part.zero_()
        part.copy_(parameter.grad)
        # A mean that the owner alone has is not alike on all ranks: it counts for all of them.
        counts_for_all = self.owner is not None and parameter not in self._own
        return part.mul_(self._reducer.ranks) if counts_for_all else part

    def _is_in_place(self, parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise ValueError(
                f"a gradient of shape {tuple(parameter.shape)} is sparse; only dense ones are "
                f"averaged"
            )
        return (
            gradient is not None
            and parameter in self._own
            and gradient.dtype == self._dtype
            and is_alone(gradient)
        )


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
