"""The peak memory of a step on its fullest rank, in parts.

Memory rises during forward, which keeps activations. Backward frees them and adds gradients, so memory
falls or rises further. Both are linear in the number of blocks, so the peak is at the start of
backward, in its first or last block, or at its end.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from stepgauge.cost.memory.activations import (
    KeptBytes,
    block_backward_bytes,
    kept,
    kept_without_checkpoints,
    loss_bytes,
    loss_forward_bytes,
    weight_copy_bytes,
)
from stepgauge.cost.memory.allocator import (
    LARGEST_SMALL,
    LEAST_OWN_SEGMENT,
    SEGMENT_ROUNDING,
)
from stepgauge.cost.memory.outside import outside
from stepgauge.cost.memory.parts import ASSUMED, Item, Memory
from stepgauge.cost.memory.sharding import held_bytes
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.plan.pipeline import Schedule, check
from stepgauge.spec.plan.pipeline.action import BACKWARD, WEIGHT, Action
from stepgauge.spec.plan.pipeline.check import Held, live
from stepgauge.spec.plan.pipeline.schedules import stages_per_rank
from stepgauge.spec.plan.shards import MOST_IN_FLIGHT, PREFETCHED
from stepgauge.spec.units import MIB, round_up

# cuBLAS takes 32 MiB on Hopper, once for forward's thread and once for autograd's. torch counts them
# (docs/memory.md).
WORKSPACES = 2 * 32 * MIB
# Bytes of AdamW's state per parameter, by precision.
STATE_BYTES = {"fp32": 8, "tf32": 8, "bf16": 8, "fp16": 8, "bf16-pure": 4, "bf16-master": 12}


def step_memory(
    operations: StepOperations,
    layout: Layout,
    *,
    accumulates: bool = False,
) -> Memory:
    """Returns the peak of a rank without a pipeline.

    If it `accumulates`, gradients of earlier passes exist from the beginning.
    """
    static = _static(operations, layout, accumulates=accumulates)
    earlier = static.gradients if accumulates else 0.0
    levels = _levels(operations, static, kept(operations), earlier)
    if WRAPPERS[layout.wrapper].packs:  # all gradients are copied into one message
        levels["end of backward"]["temporaries"] += static.gradients
    if WRAPPERS[layout.wrapper].keeps_buckets:
        levels = {name: {**parts, "buckets": static.gradients} for name, parts in levels.items()}
    moment = max(levels, key=lambda name: sum(levels[name].values()))
    return _memory(static, levels[moment], moment, outside(layout, operations))


def pipeline_memory(
    stages: Sequence[StepOperations],
    layout: Layout,
    schedule: Schedule,
    *,
    accumulates: bool = False,
) -> Memory:
    """Returns the peak of the fullest rank, from its stages and its micro-batches in flight.

    If it `accumulates`, gradients of earlier passes exist from the beginning.
    """
    keeps = [kept(stage) for stage in stages]
    held = {n: Held(keep.total, _for_weights(stages[n])) for n, keep in enumerate(keeps)}
    rows = check(schedule, held=held).schedule.ranks
    ranks = []
    for rank, row in enumerate(rows):
        own = schedule.stages(rank)
        static = _sum([_static(stages[n], layout, accumulates=True) for n in own])
        gradients = _gradients_and_weights([stages[n] for n in own], static)
        if accumulates or static.unit:
            activations = max(live(row, held))
        else:
            activations, gradients["gradients"] = fullest(row, held, static.gradients)
        temporaries = max(block_backward_bytes(stages[n]) + keeps[n].recomputed for n in own)
        parts = {
            **gradients,
            "activations in flight": activations,
            "temporaries": max(temporaries, max(loss_bytes(stages[n]) for n in own)),
            "transfer buffers": 4 * max(stages[n].stream_bytes for n in own),
        }
        ranks.append(_memory(static, parts, f"rank {rank}", outside(layout, *stages)))
    return max(ranks, key=lambda memory: memory.peak_bytes)


def fullest(
    row: Sequence[Action], held: Mapping[int, Held], gradients: float
) -> tuple[float, float]:
    """Returns activations and gradients at the moment when a rank holds most of both together.

    There are no gradients before its first backward has ended. With gpipe, all activations exist before.
    """
    levels = live(row, held)
    first = next(n for n, action in enumerate(row, start=1) if action.kind in (BACKWARD, WEIGHT))
    before, after = max(levels[:first]), max(levels[first:], default=0.0)
    return (before, 0.0) if before > after + gradients else (after, gradients)


def stage_memory(stage: StepOperations, layout: Layout) -> Memory:
    """Returns the peak of the first pipeline rank without simulating its schedule.

    Of p ranks, 1f1b and zbv hold p micro-batches of a stage at once. Interleaved schedules with v
    stages per rank hold 1 + (1 - 1/p)/v times as many (docs/pipeline.md).
    """
    ranks, keeps = layout.pipeline, kept(stage)
    per_rank = stages_per_rank(layout.schedule, layout.per_rank)
    factor = 1 + (1 - 1 / ranks) / per_rank if layout.schedule == "interleaved" else 1.0
    in_flight = min(layout.microbatches, ranks) * factor
    static = _static(stage, layout, accumulates=True)
    parts = {
        **_gradients_and_weights([stage], static),
        "activations in flight": in_flight * keeps.total,
        "temporaries": block_backward_bytes(stage) + keeps.recomputed,
        "transfer buffers": 4 * stage.stream_bytes,
    }
    return _memory(static, parts, "rank 0", outside(layout, stage))


def _gradients_and_weights(stages: Sequence[StepOperations], static: "_Static") -> dict[str, float]:
    """Returns the gradients of a pipeline rank.

    With ZeRO 3 they include whole gradients, and there are whole weights, from UNSHARD to RESHARD.
    """
    if not static.unit:
        return {"gradients": static.gradients}
    whole = sum(_allocated(stage, stage.arithmetic.weight_bytes) for stage in stages)
    return {"gradients": static.gradients + whole, "unsharded weights": whole}


@dataclasses.dataclass(frozen=True)
class _Static:
    """Bytes that do not change during a step, and the bytes of all gradients.

    ends  ZeRO 3: whole weights of embedding and head
    unit  ZeRO 3: whole weights of one block; 0 for other wrappers
    last  ZeRO 3: whole weights of the block that is called last, which keeps them until its backward
    """

    parameters: float
    ends: float
    state: float
    gradients: float
    unit: float
    last: float


def _static(operations: StepOperations, layout: Layout, *, accumulates: bool) -> _Static:
    """Returns the bytes of parameters, optimizer state and gradients."""
    wrapper, n = WRAPPERS[layout.wrapper], layout.num_replicas
    arithmetic, state = operations.arithmetic, STATE_BYTES[operations.spec.precision]

    def of(part: str, itemsize: float) -> float:
        whole = _allocated(operations, itemsize)
        return held_bytes(whole, part, operations, layout, accumulates=accumulates)

    sharded = wrapper.shards("weights") and n > 1
    unit = operations.block_parameters * arithmetic.activation_bytes
    ends = operations.end_parameters * arithmetic.activation_bytes
    return _Static(
        parameters=of("weights", arithmetic.weight_bytes),
        ends=ends if sharded else 0.0,
        state=2 * of("optimizer state", state / 2),
        gradients=of("gradients", arithmetic.weight_bytes),
        unit=unit if sharded else 0.0,
        last=unit if sharded and wrapper.keeps_last else 0.0,
    )


def _allocated(operations: StepOperations, itemsize: float) -> float:
    """Returns the allocated bytes for a value of `itemsize` per parameter.

    The caching allocator rounds a large tensor up by at most 1 MiB, to the end of its segment.
    """
    matrices = operations.block_matrices * len(operations.blocks) + operations.end_matrices
    rest = operations.num_parameters - sum(matrices)
    slack = 0.0
    for numel in matrices:
        size = numel * itemsize
        spare = round_up(int(size), SEGMENT_ROUNDING) - size
        slack += spare if size >= LEAST_OWN_SEGMENT and spare <= LARGEST_SMALL else 0.0
    return slack + (sum(matrices) + rest) * itemsize


def _sum(parts: Sequence[_Static]) -> _Static:
    names = [field.name for field in dataclasses.fields(_Static)]
    return _Static(**{name: sum(getattr(part, name) for part in parts) for name in names})


def _levels(
    operations: StepOperations, static: _Static, keeps: KeptBytes, earlier: float
) -> dict[str, dict[str, float]]:
    """Returns gradients, activations and temporaries at each moment that may be the peak.

    Gradients of earlier passes take `earlier` bytes.
    """
    layers, gradients = len(operations.blocks), static.gradients
    block_gradients = gradients * operations.block_parameters / operations.num_parameters
    end_gradients = gradients * operations.end_parameters / operations.num_parameters
    head_gradients = end_gradients / (2 if operations.is_first and operations.is_last else 1)
    in_block = block_backward_bytes(operations) + keeps.recomputed
    # ZeRO 3: gathered units (the current and prefetched ones), and gradients that are being reduced
    first_units = (1 + PREFETCHED + 1) * static.unit
    last_units = (1 + PREFETCHED + MOST_IN_FLIGHT) * static.unit
    # blocks that are recomputed together have all their activations when their backward starts
    recomputes = operations.spec.checkpointing in ("blocks", "selective")
    together = min(layers, operations.spec.checkpoint_blocks) if recomputes else 1
    last_blocks = keeps.blocks * together / layers

    def level(new_gradients: float, activations: float, temporaries: float) -> dict[str, float]:
        held = max(earlier, new_gradients), activations, temporaries
        return dict(zip(("gradients", "activations", "temporaries"), held, strict=True))

    gradients_before_last = head_gradients + (layers - together) * block_gradients
    levels = {
        "loss": level(0.0, keeps.total, loss_bytes(operations) + static.last),
        "first block of backward": level(head_gradients, keeps.blocks, in_block + first_units),
        "last block of backward": level(gradients_before_last, last_blocks, in_block + last_units),
        "end of backward": level(gradients, 0.0, operations.stream_bytes + last_units),
    }
    if operations.spec.checkpointing != "none":
        weights = layers * weight_copy_bytes(operations) + static.last
        if operations.arithmetic.is_compiled:  # compiled blocks cast their weights again
            weights = static.last
        levels["end of forward"] = level(0.0, keeps.total, weights + loss_forward_bytes(operations))
    return levels


def _for_weights(stage: StepOperations) -> float:
    """Returns what a W (weight gradient) needs of a micro-batch: both factors of every product.

    With checkpointing that can be more than forward has kept, because backward recomputes factors.
    """
    m, itemsize, model = stage.tokens, stage.arithmetic.activation_bytes, stage.model
    outputs = stage.qkv_rows + model.d_model + stage.up_rows + model.d_model
    inputs = 2 * model.d_model + stage.attention_width + stage.feed_forward_width
    nbytes = len(stage.blocks) * m * itemsize * (outputs + inputs)
    if stage.is_last and stage.fused_loss is None:
        nbytes += m * itemsize * (model.vocab_size // stage.share.tensor + model.d_model)
    return min(nbytes, kept_without_checkpoints(stage))


def _memory(
    static: _Static, parts: Mapping[str, float], moment: str, outside: Sequence[Item]
) -> Memory:
    items = [
        Item("parameters", static.parameters),
        Item("gathered embedding and head", 0.0 if "unsharded weights" in parts else static.ends),
        Item("optimizer state", static.state),
        *(Item(name, nbytes) for name, nbytes in parts.items()),
        Item("library workspaces", WORKSPACES, ASSUMED),
    ]
    return Memory([item for item in items if item.bytes], outside, moment)
