"""Sends the whole gradients of a ZeRO 3 unit as one flat message per dtype.

The message is a copy, whose memory is freed as soon as the reduce-scatter is done. Gradients sent
from their own memory stay for as long as NCCL's works hold them, until its watchdog comes round:
that took 6 GiB more at 2.7b on 2 × H200.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepgauge.parallel.communication.reducer import require_dense
from stepgauge.parallel.sharding import (
    Sharding,
    flat_real,
    free_memory,
    local_shard,
    sharded_from_shard,
)


class FlatGradients:
    """Whole gradients of parameters of one dtype, on their way to this rank's shards of the means.

    The message has one row for each rank, with that rank's rows of every gradient, in the dtype
    `dtype`. A reduce-scatter gives each rank its row. A gradient of None counts as zero.
    """

    def __init__(
        self,
        gradients: Mapping[nn.Parameter, Tensor | None],
        dtype: torch.dtype,
        sharding: Sharding,
    ):
        self._used = {parameter: g is not None for parameter, g in gradients.items()}
        self._sharding, self.work = sharding, None
        self._lengths = [
            sharding.rows_per_rank(p.shape[0]) * math.prod(p.shape[1:]) for p in gradients
        ]
        device = local_shard(next(iter(gradients))).device
        self._row = torch.empty(sum(self._lengths), dtype=dtype, device=device)
        self._message = self._row.new_empty(sharding.ranks, len(self._row))
        pack([_dense(g, p, self._row) for p, g in gradients.items()], self._message)

    def send(self) -> Any:
        return self._sharding.launch_scatter(flat_real(self._row), flat_real(self._message))

    def receive(self) -> Iterator[tuple[nn.Parameter, DTensor, bool]]:
        """Waits, then yields each parameter, its mean gradient in the parameter's dtype and sharded
        like it, and whether this rank had a gradient of it.
        """
        if self.work is not None:
            self.work.wait()
        free_memory(self._message)
        # Each mean gets its own memory: deepcopy needs that, and it can then be freed separately.
        means = [torch.empty_like(local_shard(parameter)) for parameter in self._used]
        arrived = [
            padded[: mean.numel()].view(mean.shape)
            for padded, mean in zip(self._row.split(self._lengths), means, strict=True)
        ]
        torch._foreach_copy_(means, arrived)
        free_memory(self._row)
        for (parameter, used), mean in zip(self._used.items(), means, strict=True):
            yield parameter, sharded_from_shard(parameter, mean), used


def pack(gradients: Sequence[Tensor], message: Tensor) -> None:
    """Copies equally many rows of each gradient into each row of the message, and zeros after the
    last rows of a gradient.
    """
    nonempty = [gradient for gradient in gradients if gradient.numel()]
    if nonempty:
        # One kernel for all gradients, as in torch's fully_shard. The way out: a public name of it.
        torch._chunk_cat(nonempty, dim=0, num_chunks=len(message), out=message)


def _dense(gradient: Tensor | None, parameter: nn.Parameter, row: Tensor) -> Tensor:
    """Returns the gradient, or zeros for None. Raises ValueError for a sparse gradient."""
    if gradient is None:
        return row.new_zeros(()).expand(parameter.shape)
    require_dense(gradient)
    return gradient
