"""Which blocks backward computes again, as data, and the cheapest such plan that memory allows.

The first blocks are computed again: backward reaches them last, when those that are kept whole
have given their memory back.
"""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class RecomputePlan:
    """Of `num_layers` blocks the first `blocks` keep their input alone, the next `selective` the
    results of products and attention too, the others everything.
    """

    num_layers: int
    blocks: int = 0
    selective: int = 0

    def of(self, layer: int) -> str:
        """The block's checkpointing, as --checkpointing names it."""
        if layer < self.blocks:
            return "blocks"
        return "selective" if layer < self.blocks + self.selective else "none"

    def __str__(self) -> str:
        kept = self.num_layers - self.blocks - self.selective
        return f"blocks {self.blocks}, selective {self.selective}, none {kept}"


@dataclasses.dataclass(frozen=True)
class BlockCosts:
    """Of one block: bytes that it keeps for backward, and microseconds to compute again what it
    does not.
    """

    none_bytes: float
    selective_bytes: float
    blocks_bytes: float
    selective_us: float
    blocks_us: float

    def us(self, plan: RecomputePlan) -> float:
        return plan.blocks * self.blocks_us + plan.selective * self.selective_us

    def saved_bytes(self, plan: RecomputePlan) -> float:
        """What the plan keeps less than no checkpointing does."""
        return plan.blocks * (self.none_bytes - self.blocks_bytes) + plan.selective * (
            self.none_bytes - self.selective_bytes
        )


def plans(num_layers: int, *, selective: bool = True) -> Iterator[RecomputePlan]:
    for blocks in range(num_layers + 1):
        for kept_in_part in range(num_layers + 1 - blocks if selective else 1):
            yield RecomputePlan(num_layers, blocks, kept_in_part)


def cheapest(
    num_layers: int, costs: BlockCosts, needed_bytes: float, *, selective: bool = True
) -> RecomputePlan:
    """The plan that takes the least time of those that save so many bytes; if none does, the one
    that saves the most. `selective`: whether blocks may be kept in part.
    """
    every = list(plans(num_layers, selective=selective))
    enough = [plan for plan in every if costs.saved_bytes(plan) >= needed_bytes]
    if not enough:
        return max(every, key=costs.saved_bytes)
    return min(enough, key=lambda plan: (costs.us(plan), -costs.saved_bytes(plan)))
