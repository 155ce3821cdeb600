"""The peak memory of a traced step.

The trace has what one device holds from moment to moment. A data parallel rank holds its shard of the
sharded parts. A pipeline stage holds what it keeps of each micro-batch in flight.
"""

import math
from collections.abc import Mapping, Sequence

from stepgauge.cost.memory.outside import outside
from stepgauge.cost.memory.parts import Item, Memory
from stepgauge.cost.memory.peak import fullest
from stepgauge.cost.memory.sharding import held_bytes
from stepgauge.cost.traced.network import TracedOperations
from stepgauge.spec.calibration import GROUPED
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.plan.pipeline import Schedule, check
from stepgauge.spec.plan.pipeline.action import Action
from stepgauge.spec.plan.pipeline.check import Held, live
from stepgauge.spec.plan.shards import MOST_IN_FLIGHT, PREFETCHED

# Categories of a traced step that ZeRO shards, with their names in spec/layout.py.
PART_OF = {"parameters": "weights", "optimizer state": "optimizer state", "gradients": "gradients"}


def traced_memory(
    operations: TracedOperations, layout: Layout, *, accumulates: bool
) -> Memory | None:
    """Returns the peak of the fullest rank; None if memory was not traced.

    If it `accumulates`, whole gradients exist from the first pass to the last.
    """
    moments = operations.traced.moments
    if not moments:
        return None
    gradients = max(moment.get("gradients", 0) for moment in moments)

    def held(moment: Mapping[str, int]) -> dict[str, float]:
        whole = {**moment, "gradients": gradients} if accumulates else moment
        parts = {
            name: _held(operations, layout, name, size, accumulates=accumulates)
            for name, size in whole.items()
        }
        if layout.gathers_weights:
            parts["unsharded weights"] = _unsharded(
                operations,
                in_backward=bool(moment.get("gradients")),
                keeps_last=WRAPPERS[layout.wrapper].keeps_last,
            )
        return parts

    peak = max(map(held, moments), key=lambda parts: sum(parts.values()))
    items = [Item(name, nbytes, "traced") for name, nbytes in peak.items() if nbytes]
    if WRAPPERS[layout.wrapper].keeps_buckets:
        items.append(Item("buckets", gradients, "traced"))
    return Memory(items, outside(layout, operations), "the fullest moment")


def traced_pipeline_memory(
    stages: Sequence[TracedOperations],
    layout: Layout,
    schedule: Schedule,
    *,
    accumulates: bool,
) -> Memory | None:
    """Returns the peak of the fullest pipeline rank, from its stages and its micro-batches in flight.

    None if memory was not traced. `accumulates` as in traced_memory.
    """
    if not all(stage.traced.moments for stage in stages):
        return None
    held = {
        n: Held(stage.traced.kept_bytes, min(_for_weights(stage), stage.traced.kept_bytes))
        for n, stage in enumerate(stages)
    }
    ranks = []
    for rank, row in enumerate(check(schedule, held=held).schedule.ranks):
        own = [stages[n] for n in schedule.stages(rank)]
        parts = _parts_of_rank(own, layout, row, held, accumulates=accumulates)
        items = [Item(name, nbytes, "traced") for name, nbytes in parts.items() if nbytes]
        ranks.append(Memory(items, outside(layout, *stages), f"rank {rank}"))
    return max(ranks, key=lambda memory: memory.peak_bytes)


def _parts_of_rank(
    own: Sequence[TracedOperations],
    layout: Layout,
    row: Sequence[Action],
    held: Mapping[int, Held],
    *,
    accumulates: bool,
) -> dict[str, float]:
    """Returns the bytes of each part at the fullest moment of the rank with this row of actions."""

    def whole(category: str) -> float:
        return sum(_most(stage, category) for stage in own)

    parts = {
        category: sum(
            _held(stage, layout, category, _most(stage, category), accumulates=True)
            for stage in own
        )
        for category in PART_OF
    }
    if WRAPPERS[layout.wrapper].shards("weights") and layout.num_replicas > 1:
        parts["gradients"] += whole("gradients")
        parts["unsharded weights"] = whole("parameters")
        in_flight = max(live(row, held))
    elif accumulates:
        in_flight = max(live(row, held))
    else:
        in_flight, parts["gradients"] = fullest(row, held, parts["gradients"])
    return {
        **parts,
        "activations in flight": in_flight,
        "temporaries": max(map(_temporaries, own)),
        "transfer buffers": 4 * max(stage.stream_bytes for stage in own),
        "other": max(_most(stage, "other") for stage in own),
    }


def _temporaries(stage: TracedOperations) -> float:
    """Returns the temporaries of a stage, in addition to what a micro-batch keeps.

    At the end of a backward, when nothing is kept, a new gradient exists next to the sum of earlier ones.
    """
    added = max(stage.traced.parameters, default=0) * stage.arithmetic.weight_bytes
    return max(stage.traced.most_bytes, added) - stage.traced.kept_bytes


def _most(stage: TracedOperations, category: str) -> float:
    return max(moment.get(category, 0) for moment in stage.traced.moments)


def _for_weights(stage: TracedOperations) -> float:
    """Returns the bytes of both factors of all weight-gradient products.

    Their sizes are (N, K, tokens), or (batch, N, K, tokens). Products of experts count all tokens.
    """
    products = (
        term
        for term in stage.traced.terms("backward")
        if term.for_weights and term.is_product and term.count
    )
    return sum(
        term.count * pairs * (n + k) * tokens * stage.arithmetic.activation_bytes
        for term in products
        for *batch, n, k, tokens in [term.sizes]
        for pairs in [1 if GROUPED in term.operation else math.prod(batch)]
    )


def _held(
    operations: TracedOperations,
    layout: Layout,
    category: str,
    nbytes: float,
    *,
    accumulates: bool,
) -> float:
    """Returns the bytes that a rank holds of a traced category.

    ZeRO 3 is traced in the activations' dtype if it gathers weights for each block.
    """
    if category not in PART_OF:
        return nbytes
    if layout.gathers_weights:
        arithmetic = operations.arithmetic
        nbytes *= arithmetic.weight_bytes / arithmetic.activation_bytes
    return held_bytes(nbytes, PART_OF[category], operations, layout, accumulates=accumulates)


def _unsharded(operations: TracedOperations, *, in_backward: bool, keeps_last: bool) -> float:
    """Returns the bytes of unsharded weights and gradients of ZeRO 3, as in memory/peak.py."""
    largest = max(operations.units.values(), default=0)
    ends = operations.num_parameters - sum(operations.units.values())
    # During the loss at most the unit that was called last is whole.
    units = 1 + PREFETCHED + MOST_IN_FLIGHT if in_backward else int(keeps_last)
    return (ends + units * largest) * operations.arithmetic.activation_bytes
