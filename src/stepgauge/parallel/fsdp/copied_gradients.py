"""Sends the whole gradients of a ZeRO 3 unit by copies, from where they lie and to where their means
belong. A collective would need them in one flat message (flat_gradients.py). The work of copies lets
go of the gradients when it has been waited for, while those of NCCL keep theirs for longer.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepgauge.parallel.communication.copied_collectives import CopiedCollectives
from stepgauge.parallel.fsdp.flat_gradients import dense
from stepgauge.parallel.sharding import local_shard, sharded_like


class CopiedGradients:
    """Whole gradients of parameters of one dtype, on their way to this rank's shards of the means.

    They are averaged in the dtype `dtype`. A gradient of None counts as zero.
    """

    def __init__(
        self,
        gradients: Mapping[nn.Parameter, Tensor | None],
        dtype: torch.dtype,
        copier: CopiedCollectives,
    ):
        self._used = {parameter: g is not None for parameter, g in gradients.items()}
        shards = [local_shard(parameter) for parameter in gradients]
        self._means = [torch.empty_like(shard, dtype=dtype) for shard in shards]
        self._wholes = [
            dense(g, p, self._means[0]).to(dtype).resolve_conj().resolve_neg().contiguous()
            for p, g in gradients.items()
        ]
        self._copier = copier

    def send(self) -> None:
        slices, wholes = map(_real, self._means), map(_real, self._wholes)
        self._work = self._copier.reduce_scatter_mean([*slices], [*wholes])
        self._wholes = []

    def receive(self) -> Iterator[tuple[nn.Parameter, DTensor, bool]]:
        """As in FlatGradients."""
        self._work.wait()
        for (parameter, used), mean in zip(self._used.items(), self._means, strict=True):
            yield parameter, sharded_like(parameter, mean.to(parameter.dtype)), used


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
