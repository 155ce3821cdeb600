"""The share of a training run that one rank has."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import torch.distributed as dist
from torch import Tensor

from stepgauge.spec.layout import Layout


@dataclasses.dataclass(frozen=True)
class RankShare:
    """A rank of `ranks` in the default process group; by default a single process.

    data_rank, data_ranks  its position on the data axis, whose ranks get different rows of a batch
    losses                 how many ranks have a loss; it is zero on the others
    """

    rank: int = 0
    ranks: int = 1
    data_rank: int = 0
    data_ranks: int = 1
    losses: int = 1

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Self:
        """Returns a rank's share under a layout. In a pipeline only the last stage has a loss."""
        return cls(
            rank,
            layout.ranks,
            data_rank=layout.place(rank)["data"],
            data_ranks=layout.data,
            losses=layout.num_replicas * layout.tensor,
        )

    @property
    def writes(self) -> bool:
        """True on the rank that writes to the run's folder."""
        return self.rank == 0

    def shares(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Returns this rank's rows of each batch. The number of data ranks must divide them."""
        return [batch.chunk(self.data_ranks)[self.data_rank] for batch in batches]

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean of a loss over the ranks that have one."""
        if self.ranks > 1:
            values = values / self.losses
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Waits until all ranks have called it."""
        if self.ranks > 1:
            dist.barrier()


SINGLE_PROCESS = RankShare()
