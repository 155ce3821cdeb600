"""Which share of a training run a process has: all of it, or a rank's."""

import dataclasses
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Place:
    """A rank of `ranks` in the default process group; alone by default."""

    rank: int = 0
    ranks: int = 1

    @property
    def writes(self) -> bool:
        """Whether this process owns the run's folder."""
        return self.rank == 0

    def shares(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of each batch, which the number of ranks divides."""
        return [batch.chunk(self.ranks)[self.rank] for batch in batches]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over ranks."""
        if self.ranks > 1:
            values = values / self.ranks
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.ranks > 1:
            dist.barrier()


ALONE = Place()
