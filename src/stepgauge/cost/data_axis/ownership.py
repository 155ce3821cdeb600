"""The number of parameters that a data parallel rank owns and updates."""

from stepgauge.cost.streams.program import Operations
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.plan.shards import deal_out
from stepgauge.spec.units import ceil_div


def most_owned(operations: Operations, ranks: int) -> int:
    """Returns the number of parameters of the rank that owns most (spec/plan/shards.py).

    Tensors are not split, so it is at least as many as the largest tensor has.
    """
    matrices = operations.block_matrices * len(operations.blocks) + operations.end_matrices
    vectors = operations.num_parameters - sum(matrices)
    return max(deal_out(matrices, [0] * ranks)[0]) + ceil_div(vectors, ranks)


def num_updated(operations: Operations, wrapper: str, ranks: int) -> float:
    """Returns the number of parameters that the rank that updates most of them does."""
    if WRAPPERS[wrapper].shards("weights"):
        return operations.num_parameters / ranks
    if WRAPPERS[wrapper].shards("optimizer state"):
        return most_owned(operations, ranks)
    return operations.num_parameters
