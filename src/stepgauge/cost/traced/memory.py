"""Peak memory of a traced step over a data axis: from moment to moment what one device held, with the
parts that a rank has its share of only. Of a pipeline: what a stage keeps of each micro-batch that is
in flight.
"""

import math
from collections.abc import Mapping, Sequence

from stepgauge.cost.data_axis.buckets import most_owned
from stepgauge.cost.memory.peak import ASSUMED, COMMUNICATOR, Item, Memory, fullest
from stepgauge.cost.traced.network import TracedOperations
from stepgauge.spec.calibration import GROUPED
from stepgauge.spec.hardware import CUDA_CONTEXT
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.plan.pipeline import Schedule, check
from stepgauge.spec.plan.pipeline.action import Action
from stepgauge.spec.plan.pipeline.check import Held, live
from stepgauge.spec.plan.shards import MOST_IN_FLIGHT, PREFETCHED

# Categories of a traced step that ZeRO shards, by what spec/layout.py calls them.
PART_OF = {"parameters": "weights", "optimizer state": "optimizer state", "gradients": "gradients"}


def traced_memory(
    operations: TracedOperations, layout: Layout, *, accumulates: bool
) -> Memory | None:
    """Of the fullest rank; None where memory was not traced. `accumulates`: whole gradients are
    there from the first pass to the last.
    """
    moments = operations.traced.moments
    if not moments:
        return None
    gradients = max(moment.get("gradients", 0) for moment in moments)

    def held(moment: Mapping[str, int]) -> dict[str, float]:
        whole = {**moment, "gradients": gradients} if accumulates else moment
        found = {
            name: size * _share(operations, layout, name, accumulates)
            for name, size in whole.items()
        }
        if layout.gathers_weights:
            found["unsharded weights"] = _unsharded(operations, bool(moment.get("gradients")))
        return found

    fullest = max(map(held, moments), key=lambda held: sum(held.values()))
    items = [Item(name, nbytes, "traced") for name, nbytes in fullest.items() if nbytes]
    if WRAPPERS[layout.wrapper].keeps_buckets:
        items.append(Item("buckets", gradients, "traced"))
    return Memory(items, _outside(layout), "the fullest moment")


def _outside(layout: Layout) -> list[Item]:
    outside = [Item("CUDA context", CUDA_CONTEXT, ASSUMED)]
    if layout.sizes:
        outside.append(Item("communicators", COMMUNICATOR, ASSUMED))
    return outside


def traced_pipeline_memory(
    stages: Sequence[TracedOperations],
    layout: Layout,
    schedule: Schedule,
    *,
    accumulates: bool,
) -> Memory | None:
    """Of the fullest rank of a pipeline, by the stages that it has and the micro-batches that it has
    in flight; None where memory was not traced. `accumulates`: as traced_memory has it.
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
        ranks.append(Memory(items, _outside(layout), f"rank {rank}"))
    return max(ranks, key=lambda memory: memory.peak_bytes)


def _parts_of_rank(
    own: Sequence[TracedOperations],
    layout: Layout,
    row: Sequence[Action],
    held: Mapping[int, Held],
    *,
    accumulates: bool,
) -> dict[str, float]:
    """Bytes of each, at the fullest moment of the rank that does the actions of the row."""

    def whole(category: str) -> float:
        return sum(_most(stage, category) for stage in own)

    parts = {
        category: sum(_most(stage, category) * _stage_share(stage, layout, part) for stage in own)
        for category, part in PART_OF.items()
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
        "buffers of transfers": 4 * max(stage.stream_bytes for stage in own),
        "other": max(_most(stage, "other") for stage in own),
    }


def _temporaries(stage: TracedOperations) -> float:
    """Beside what a micro-batch keeps. Where its backward ends that has gone, and a gradient stands
    beside those of earlier micro-batches that it is added to.
    """
    added = max(stage.traced.parameters, default=0) * stage.arithmetic.weight_bytes
    return max(stage.traced.most_bytes, added) - stage.traced.kept_bytes


def _most(stage: TracedOperations, category: str) -> float:
    return max(moment.get(category, 0) for moment in stage.traced.moments)


def _stage_share(stage: TracedOperations, layout: Layout, part: str) -> float:
    """A stage's gradients add up whole before ZeRO 2 gives them to their owners; the weights of
    ZeRO 3 are shared in the type that they were traced in.
    """
    wrapper, ranks = WRAPPERS[layout.wrapper], layout.num_replicas
    if ranks == 1 or not wrapper.shards(part) or not stage.num_parameters:
        return 1.0
    if wrapper.shards("weights"):
        return 1 / ranks
    return 1.0 if part == "gradients" else most_owned(stage, ranks) / stage.num_parameters


def _for_weights(stage: TracedOperations) -> float:
    """Both factors of each product for a gradient of weights, whose sizes are (N, K, tokens), or those
    of a batch of them; of experts the tokens are those of all.
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


def _share(operations: TracedOperations, layout: Layout, category: str, accumulates: bool) -> float:
    """Of what one device holds. The step of ZeRO 3 is traced in the type that is computed in, and
    whole gradients add up before ZeRO 2 gives them to their owners.
    """
    wrapper, arithmetic = WRAPPERS[layout.wrapper], operations.arithmetic
    part = PART_OF.get(category)
    if layout.num_replicas == 1 or part is None or not wrapper.shards(part):
        return 1.0
    if layout.gathers_weights:
        return arithmetic.weight_bytes / arithmetic.activation_bytes / layout.num_replicas
    if category == "gradients" and accumulates:
        return 1.0
    return most_owned(operations, layout.num_replicas) / operations.num_parameters


def _unsharded(operations: TracedOperations, in_backward: bool) -> float:
    """What ZeRO 3 has whole at once, gradients on their way among it: as memory/peak.py has it."""
    largest = max(operations.units.values(), default=0)
    ends = operations.num_parameters - sum(operations.units.values())
    units = 1 + PREFETCHED + MOST_IN_FLIGHT if in_backward else 0  # the loss is outside of all
    return (ends + units * largest) * operations.arithmetic.activation_bytes
