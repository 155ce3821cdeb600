"""The bytes of weights, gradients and optimizer state that a data parallel rank holds."""

from stepgauge.cost.data_axis.ownership import most_owned
from stepgauge.cost.streams.program import Operations
from stepgauge.spec.layout import WRAPPERS, Layout


def held_bytes(
    whole: float, part: str, operations: Operations, layout: Layout, *, accumulates: bool
) -> float:
    """Returns the bytes on the rank that holds most of `part` (SHARDED_PARTS), of `whole` bytes.

    ZeRO 2 accumulates whole gradients before it reduces them to their owners. ZeRO 3 reduces them in
    each pass.
    """
    wrapper, ranks = WRAPPERS[layout.wrapper], layout.num_replicas
    if ranks == 1 or not wrapper.shards(part) or not operations.num_parameters:
        return whole
    if wrapper.shards("weights"):  # equal slices of each
        return whole / ranks
    if part == "gradients" and accumulates:
        return whole
    return whole * most_owned(operations, ranks) / operations.num_parameters
