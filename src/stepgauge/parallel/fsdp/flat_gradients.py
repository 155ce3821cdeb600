"""The whole gradients of a unit of ZeRO 3 behind each other, as one message a type.

The message is a copy in memory of our own, which is freed as soon as it has arrived. Gradients that
are sent where they lie stay for as long as NCCL's works hold them, until its watchdog comes round:
that took 6 GiB more at 2.7b on 2 × H200.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepgauge.parallel.communication.reducer import require_dense
from stepgauge.parallel.sharding import Sharding, like, local, real, release


class FlatGradients:
    """Gradients of parameters of one type, on their way to this rank's parts of their means.

    A row a rank, and in it that rank's rows of every gradient, in the type `dtype`: what a
    reduce-scatter gives a rank is one row. None counts as zero.
    """

    def __init__(
        self,
        gradients: Mapping[nn.Parameter, Tensor | None],
        dtype: torch.dtype,
        sharding: Sharding,
    ):
        self._used = {parameter: g is not None for parameter, g in gradients.items()}
        self._sharding, self.work = sharding, None
        self._lengths = [sharding.rows(p.shape[0]) * math.prod(p.shape[1:]) for p in gradients]
        device = local(next(iter(gradients))).device
        self._mine = torch.empty(sum(self._lengths), dtype=dtype, device=device)
        self._whole = self._mine.new_empty(sharding.ranks, len(self._mine))
        pack([_dense(g, p, self._mine) for p, g in gradients.items()], self._whole)

    def send(self) -> Any:
        return self._sharding.launch_scatter(real(self._mine), real(self._whole))

    def receive(self) -> Iterator[tuple[nn.Parameter, DTensor, bool]]:
        """Waits; then each parameter, this rank's part of its mean in the parameter's type, and
        whether this rank had a gradient of it.
        """
        if self.work is not None:
            self.work.wait()
        release(self._whole)
        # each in memory of its own, which deepcopy asks for and which one alone can give back
        parts = [torch.empty_like(local(parameter)) for parameter in self._used]
        arrived = [
            padded[: part.numel()].view(part.shape)
            for padded, part in zip(self._mine.split(self._lengths), parts, strict=True)
        ]
        torch._foreach_copy_(parts, arrived)
        release(self._mine)
        for (parameter, used), part in zip(self._used.items(), parts, strict=True):
            yield parameter, like(parameter, part), used


def pack(gradients: Sequence[Tensor], whole: Tensor) -> None:
    """Copies the rows of each gradient to the rows of `whole` of equally many; what is left of the
    last ones is zero.
    """
    filled = [gradient for gradient in gradients if gradient.numel()]
    if filled:
        # One kernel of all, as torch's fully_shard packs. The way out: a public name of it.
        torch._chunk_cat(filled, dim=0, num_chunks=len(whole), out=whole)


def _dense(gradient: Tensor | None, parameter: nn.Parameter, message: Tensor) -> Tensor:
    """The gradient, or zero for None."""
    if gradient is None:
        return message.new_zeros(()).expand(parameter.shape)
    require_dense(gradient)
    return gradient
