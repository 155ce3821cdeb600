"""Which share of a training run a process has: all of it, or a rank's."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import torch.distributed as dist
from torch import Tensor

from stepgauge.spec.layout import Layout


@dataclasses.dataclass(frozen=True)
class RankShare:
    """A rank of `ranks` in the default process group; alone by default.

    data_rank, data_ranks  its place among those that train on other rows of a batch
    losses                 ranks that have a loss; on the others it is zero
    """

    rank: int = 0
    ranks: int = 1
    data_rank: int = 0
    data_ranks: int = 1
    losses: int = 1

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Self:
        """Of a pipeline the last stage alone has the loss."""
        return cls(
            rank,
            layout.ranks,
            data_rank=layout.place(rank)["data"],
            data_ranks=layout.data,
            losses=layout.num_replicas * layout.tensor,
        )

    @property
    def writes(self) -> bool:
        """Whether this process owns the run's folder."""
        return self.rank == 0

    def shares(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of each batch, which the number of data ranks divides."""
        return [batch.chunk(self.data_ranks)[self.data_rank] for batch in batches]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the ranks that have a loss."""
        if self.ranks > 1:
            values = values / self.losses
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.ranks > 1:
            dist.barrier()


SINGLE_PROCESS = RankShare()
