"""Peak memory of a traced step over a data axis: from moment to moment what one device held, with the
parts that a rank has its share of only.
"""

from collections.abc import Mapping

from stepgauge.cost.data_axis.buckets import most_owned
from stepgauge.cost.memory.peak import ASSUMED, COMMUNICATOR, Item, Memory
from stepgauge.cost.traced.network import TracedOperations
from stepgauge.spec.hardware import CUDA_CONTEXT
from stepgauge.spec.layout import WRAPPERS, Layout
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
    outside = [Item("CUDA context", CUDA_CONTEXT, ASSUMED)]
    if layout.sizes:
        outside.append(Item("communicators", COMMUNICATOR, ASSUMED))
    return Memory(items, outside, "the fullest moment")


def _share(operations: TracedOperations, layout: Layout, category: str, accumulates: bool) -> float:
    """Of what one device holds. The step of ZeRO 3 is traced in the type that is computed in, and
    whole gradients add up before ZeRO 2 gives them to their owners.
    """
    wrapper, how = WRAPPERS[layout.wrapper], operations.how
    part = PART_OF.get(category)
    if layout.num_replicas == 1 or part is None or not wrapper.shards(part):
        return 1.0
    if layout.gathers_weights:
        return how.weight / how.activation / layout.num_replicas
    if category == "gradients" and accumulates:
        return 1.0
    return most_owned(operations, layout.num_replicas) / operations.num_parameters


def _unsharded(operations: TracedOperations, in_backward: bool) -> float:
    """What ZeRO 3 has whole at once, gradients on their way among it: as memory/peak.py has it."""
    largest = max(operations.units.values(), default=0)
    ends = operations.num_parameters - sum(operations.units.values())
    units = 1 + PREFETCHED + MOST_IN_FLIGHT if in_backward else 0  # the loss is outside of all
    return (ends + units * largest) * operations.how.activation
