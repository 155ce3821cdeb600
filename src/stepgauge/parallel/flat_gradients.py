"""The whole gradients of a unit of ZeRO 3 behind each other, as one message a type.

The message is a copy in memory of our own, which is freed as soon as it has arrived. Gradients that
are sent where they lie stay for as long as NCCL's works hold them, until its watchdog comes round:
that took 6 GiB more at 2.7b on 2 × H200.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepgauge.parallel.sharding import Sharding, local, real, release


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
        self._shapes = [(sharding.rows(p.shape[0]), *p.shape[1:]) for p in gradients]
        self._lengths = [math.prod(shape) for shape in self._shapes]
        device = next(iter(gradients)).device
        self._mine = torch.empty(sum(self._lengths), dtype=dtype, device=device)
        self._whole = self._mine.new_empty(sharding.ranks, len(self._mine))
        columns = self._whole.split(self._lengths, dim=1)
        for gradient, column, shape in zip(gradients.values(), columns, self._shapes, strict=True):
            _pack(gradient, column.view(sharding.ranks, *shape))

    def send(self) -> Any:
        return self._sharding.launch_scatter(real(self._mine), real(self._whole))

    def receive(self) -> Iterator[tuple[nn.Parameter, DTensor, bool]]:
        """Waits; then each parameter, this rank's part of its mean in the parameter's type, and
        whether this rank had a gradient of it.
        """
        if self.work is not None:
            self.work.wait()
        release(self._whole)
        arrived = [
            part.view(shape)[: local(parameter).shape[0]]
            for parameter, part, shape in zip(
                self._used, self._mine.split(self._lengths), self._shapes, strict=True
            )
        ]
        # each in memory of its own, which deepcopy asks for and which one alone can give back
        parts = [
            part.new_empty(part.shape, dtype=p.dtype)
            for p, part in zip(self._used, arrived, strict=True)
        ]
        torch._foreach_copy_(parts, arrived)
        release(self._mine)
        for (parameter, used), part in zip(self._used.items(), parts, strict=True):
            yield parameter, self._sharding.distributed(part, parameter.shape), used


def _pack(gradient: Tensor | None, places: Tensor) -> None:
    """Copies the rows of a gradient to the ranks' places of equally many; what is left of the last
    ones is zero.
    """
    if gradient is None:
        places.zero_()
        return
    if gradient.is_sparse:
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} is sparse; only dense ones are averaged"
        )
    rows = max(1, places.shape[1])
    full, rest = divmod(gradient.shape[0], rows)
    places[:full].copy_(gradient[: full * rows].view(full, rows, *gradient.shape[1:]))
    places[full:].zero_()
    if rest:
        places[full, :rest].copy_(gradient[full * rows :])
