"""Which blocks backward computes again, as data, and the cheapest such plan that memory allows.

Blocks of which the least is kept are the first: backward reaches them last, when the others have
given their memory back.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping

# From what keeps least to what keeps most; the rest of the blocks keep everything.
AGAIN = ("blocks", "feed-forward", "selective")


@dataclasses.dataclass(frozen=True)
class RecomputePlan:
    """Of `num_layers` blocks the first `blocks` keep their input alone, the next `feed_forward`
    attention with its products too, the next `selective` the results of all products, the others
    everything.
    """

    num_layers: int
    blocks: int = 0
    feed_forward: int = 0
    selective: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """The number of blocks by their checkpointing, as --checkpointing names it, in order."""
        again = dict(zip(AGAIN, (self.blocks, self.feed_forward, self.selective), strict=True))
        return {**again, "none": self.num_layers - sum(again.values())}

    def of(self, layer: int) -> str:
        """The block's checkpointing."""
        return [name for name, count in self.counts.items() for _ in range(count)][layer]

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.counts.items())


@dataclasses.dataclass(frozen=True)
class BlockCosts:
    """Of one block, by each checkpointing that can be had: bytes that it keeps for backward, and
    microseconds to compute again what it does not.
    """

    kept_bytes: Mapping[str, float]
    again_us: Mapping[str, float]

    def us(self, plan: RecomputePlan) -> float:
        return sum(self.again_us[name] * count for name, count in plan.counts.items() if count)

    def saved_bytes(self, plan: RecomputePlan) -> float:
        """What the plan keeps less than no checkpointing does."""
        kept = sum(self.kept_bytes[name] * count for name, count in plan.counts.items() if count)
        return self.kept_bytes["none"] * plan.num_layers - kept


def plans(num_layers: int, among: Collection[str] = AGAIN) -> Iterator[RecomputePlan]:
    """All that compute blocks again in the ways named."""
    for blocks in range(num_layers + 1 if "blocks" in among else 1):
        left = num_layers - blocks
        for feed_forward in range(left + 1 if "feed-forward" in among else 1):
            for selective in range(left - feed_forward + 1 if "selective" in among else 1):
                yield RecomputePlan(num_layers, blocks, feed_forward, selective)


def cheapest(num_layers: int, costs: BlockCosts, needed_bytes: float) -> RecomputePlan:
    """The plan that takes the least time of those that save so many bytes; if none does, the one
    that saves the most.
    """
    every = list(plans(num_layers, costs.kept_bytes))
    enough = [plan for plan in every if costs.saved_bytes(plan) >= needed_bytes]
    if not enough:
        return max(every, key=costs.saved_bytes)
    return min(enough, key=lambda plan: (costs.us(plan), -costs.saved_bytes(plan)))
