"""What the comparison of replicated with sharded training asks beyond its rows, which are those of
data parallel.
"""

import dataclasses

from stepgauge.spec.fields import check, option

# Wrappers of E11, each replicating one beside the sharding one of the same make.
PAIRS = (("torch-ddp", "torch-fsdp"), ("bucketed", "zero3"))
COMPARED = tuple(wrapper for pair in PAIRS for wrapper in pair)
SEEDS = (1, 2, 3)
GLOBAL_BATCHES = (64, 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """A batch that all ranks share."""

    global_batch: int = option(64, "sequences of all ranks together", least=1, most=1_000_000)

    def __post_init__(self) -> None:
        check(self)

    def of_rank(self, ranks: int) -> int:
        """What each rank takes. Raises ValueError for one rank, or a batch that does not divide."""
        if ranks < 2:
            raise ValueError(f"ranks is {ranks}; sharding wants at least 2")
        if self.global_batch % ranks:
            raise ValueError(
                f"global_batch is {self.global_batch}, which {ranks} ranks do not divide; choose a multiple of {ranks}"
            )
        return self.global_batch // ranks
