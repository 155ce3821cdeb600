"""Recompute plans as data: how each block is checkpointed, and the cheapest plan that fits memory.

The first blocks keep the least: backward reaches them last, when the other blocks have already
freed their activations.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping

# Ways to checkpoint a block, from the one that keeps least. Blocks without any keep everything.
CHECKPOINTED = ("blocks", "feed-forward", "selective")


@dataclasses.dataclass(frozen=True)
class RecomputePlan:
    """How the blocks of a network are checkpointed, from the first block to the last.

    blocks        number of blocks that keep only their input
    feed_forward  number of following blocks that keep attention and its products too
    selective     number of following blocks that keep the results of all matrix products
    """

    num_layers: int
    blocks: int = 0
    feed_forward: int = 0
    selective: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """The number of blocks for each value of --checkpointing, in the order of the blocks."""
        numbers = (self.blocks, self.feed_forward, self.selective)
        return {
            **dict(zip(CHECKPOINTED, numbers, strict=True)),
            "none": self.num_layers - sum(numbers),
        }

    def of(self, layer: int) -> str:
        """Returns the block's value of --checkpointing."""
        return [name for name, count in self.counts.items() for _ in range(count)][layer]

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.counts.items())


@dataclasses.dataclass(frozen=True)
class BlockCosts:
    """Costs of one block for each available value of --checkpointing.

    kept_bytes    memory that the block keeps for backward
    recompute_us  time to recompute the rest, in microseconds
    """

    kept_bytes: Mapping[str, float]
    recompute_us: Mapping[str, float]

    def us(self, plan: RecomputePlan) -> float:
        """Returns the plan's total recompute time, in microseconds."""
        return sum(self.recompute_us[name] * count for name, count in plan.counts.items() if count)

    def saved_bytes(self, plan: RecomputePlan) -> float:
        """Returns the memory that the plan saves compared with no checkpointing."""
        kept = sum(self.kept_bytes[name] * count for name, count in plan.counts.items() if count)
        return self.kept_bytes["none"] * plan.num_layers - kept


def plans(num_layers: int, among: Collection[str] = CHECKPOINTED) -> Iterator[RecomputePlan]:
    """Yields all plans that use only the given ways of checkpointing."""
    for blocks in range(num_layers + 1 if "blocks" in among else 1):
        left = num_layers - blocks
        for feed_forward in range(left + 1 if "feed-forward" in among else 1):
            for selective in range(left - feed_forward + 1 if "selective" in among else 1):
                yield RecomputePlan(num_layers, blocks, feed_forward, selective)


def cheapest(num_layers: int, costs: BlockCosts, needed_bytes: float) -> RecomputePlan:
    """Returns the fastest of the plans that save `needed_bytes`, or the plan that saves most if none
    saves that much.
    """
    candidates = list(plans(num_layers, costs.kept_bytes))
    fitting = [plan for plan in candidates if costs.saved_bytes(plan) >= needed_bytes]
    if not fitting:
        return max(candidates, key=costs.saved_bytes)
    return min(fitting, key=lambda plan: (costs.us(plan), -costs.saved_bytes(plan)))
