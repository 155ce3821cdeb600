"""Peak memory of a traced step over a data axis: from moment to moment what one device held, with the
parts that a rank has its share of only.
"""

from stepgauge.cost.buckets_sent import most_owned
from stepgauge.cost.data_axis import TORCH_DDP
from stepgauge.cost.memory import ASSUMED, COMMUNICATOR, Item, Memory
from stepgauge.cost.traced import TracedOperations
from stepgauge.spec.hardware import CUDA_CONTEXT
from stepgauge.spec.layout import WRAPPERS, Layout

# Categories of a traced step that ZeRO shards, by the names that spec/layout.py has for them, too.
SHARDED = ("optimizer state", "gradients")


def traced_memory(
    operations: TracedOperations, layout: Layout, *, accumulates: bool
) -> Memory | None:
    """Of the fullest rank; None where memory was not traced. `accumulates`: whole gradients are
    there from the first pass to the last.
    """
    moments = operations.traced.moments
    if not moments:
        return None
    wrapper = WRAPPERS[layout.wrapper]
    share = most_owned(operations, layout.data) / operations.num_parameters
    gradients = max(moment.get("gradients", 0) for moment in moments)

    def of_a_rank(category: str, nbytes: float) -> float:
        if category == "gradients" and accumulates:
            return gradients
        is_sharded = category in SHARDED and wrapper.shards(category)
        return nbytes * share if is_sharded and layout.data > 1 else nbytes

    fullest = max(
        ({name: of_a_rank(name, size) for name, size in moment.items()} for moment in moments),
        key=lambda held: sum(held.values()),
    )
    items = [Item(name, nbytes, "traced") for name, nbytes in fullest.items() if nbytes]
    if layout.wrapper in TORCH_DDP:
        items.append(Item("buckets", gradients, "traced"))
    outside = [Item("CUDA context", CUDA_CONTEXT, ASSUMED)]
    if layout.axes:
        outside.append(Item("communicators", COMMUNICATOR, ASSUMED))
    return Memory(items, outside, "the fullest moment")
