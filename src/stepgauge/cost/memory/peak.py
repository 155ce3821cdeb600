"""Peak memory of a step on its fullest rank, itemised: parameters, gradients, optimizer state,
activations, and what libraries take.

A step's memory rises while forward keeps activations and falls, or goes on rising, as backward
turns them into gradients; both are linear in the blocks, so the peak is where backward begins, in
its first or last block, or at its end.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from stepgauge.cost.data_axis.buckets import most_owned
from stepgauge.cost.memory.activations import (
    KeptBytes,
    kept,
    narrow_copies,
    of_block_backward,
    of_loss,
)
from stepgauge.cost.memory.allocator import (
    LARGEST_SMALL,
    LEAST_OWN_SEGMENT,
    SEGMENT_ROUNDING,
)
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.spec.hardware import CUDA_CONTEXT
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.plan.pipeline import Schedule, check
from stepgauge.spec.plan.pipeline.action import BACKWARD, WEIGHT, Action
from stepgauge.spec.plan.pipeline.check import Held, live
from stepgauge.spec.plan.pipeline.schedules import stages_per_rank
from stepgauge.spec.plan.shards import MOST_IN_FLIGHT, PREFETCHED
from stepgauge.spec.units import MIB, round_up

# cuBLAS takes 32 MiB on Hopper, once for forward's thread and once for autograd's; they are of
# torch's count (docs/memory.md).
WORKSPACES = 2 * 32 * MIB
# Outside of torch's count, beside the CUDA context: buffers of a communicator of NCCL (assumed: 16
# channels of 4 MiB for each of three protocols are under 200 MiB).
COMMUNICATOR = 200 * MIB
# Bytes of optimizer state a parameter, by precision; AdamW.
STATE_BYTES = {"fp32": 8, "tf32": 8, "bf16": 8, "fp16": 8, "bf16-pure": 4, "bf16-master": 12}
FORMULA, ASSUMED = "formula", "assumed"


@dataclasses.dataclass(frozen=True)
class Item:
    """A part of the peak."""

    name: str
    bytes: float
    source: str = FORMULA


@dataclasses.dataclass(frozen=True)
class Memory:
    """The peak of torch's count on the fullest rank, its parts, and what lies outside of it.

    moment  when it is
    """

    items: Sequence[Item]
    outside: Sequence[Item]
    moment: str

    @property
    def peak_bytes(self) -> float:
        return sum(item.bytes for item in self.items)

    @property
    def device_bytes(self) -> float:
        """What the device must have."""
        return self.peak_bytes + sum(item.bytes for item in self.outside)

    def rows(self) -> list[list[object]]:
        head: list[object] = ["part", "bytes", "source"]
        inside = [[item.name, item.bytes, item.source] for item in self.items]
        return [head, *inside, *([f"{i.name} (outside)", i.bytes, i.source] for i in self.outside)]


def step_memory(
    operations: StepOperations,
    layout: Layout,
    *,
    accumulates: bool = False,
) -> Memory:
    """Of a rank without a pipeline. `accumulates`: gradients of earlier passes are there."""
    found = _held(operations, layout, accumulates=accumulates)
    keeps = kept(operations)
    before = found.gradients if accumulates else 0.0
    levels = _levels(operations, found, keeps, before)
    if WRAPPERS[layout.wrapper].packs:  # all gradients are copied into one message
        levels["end of backward"]["temporaries"] += found.gradients
    if WRAPPERS[layout.wrapper].keeps_buckets:
        levels = {name: {**parts, "buckets": found.gradients} for name, parts in levels.items()}
    moment = max(levels, key=lambda name: sum(levels[name].values()))
    return _memory(found, levels[moment], moment, layout, boxes_of(operations))


def pipeline_memory(
    stages: Sequence[StepOperations],
    layout: Layout,
    schedule: Schedule,
    *,
    accumulates: bool = False,
) -> Memory:
    """Of the fullest rank: its stages, and the micro-batches that it has in flight. `accumulates`:
    gradients of earlier passes are there from the beginning.
    """
    keeps = [kept(stage) for stage in stages]
    held = {n: Held(keep.total, _for_weights(stages[n])) for n, keep in enumerate(keeps)}
    rows = check(schedule, held=held).schedule.ranks
    ranks = []
    for rank, row in enumerate(rows):
        own = schedule.stages(rank)
        base = _sum([_held(stages[n], layout, accumulates=True) for n in own])
        resident = _resident([stages[n] for n in own], base)
        if accumulates or base.unit:
            activations = max(live(row, held))
        else:
            activations, resident["gradients"] = fullest(row, held, base.gradients)
        extra = max(of_block_backward(stages[n]) + keeps[n].again for n in own)
        extra = max(extra, max(of_loss(stages[n]) for n in own))
        buffers = 4 * max(stages[n].stream_bytes for n in own)
        parts = {
            **resident,
            "activations in flight": activations,
            "temporaries": extra,
            "buffers of transfers": buffers,
        }
        ranks.append(_memory(base, parts, f"rank {rank}", layout, boxes_of(stages[0])))
    return max(ranks, key=lambda memory: memory.peak_bytes)


def fullest(
    row: Sequence[Action], held: Mapping[int, Held], gradients: float
) -> tuple[float, float]:
    """Activations and gradients where a rank has most: of these none until its first backward has
    ended. With gpipe all activations are there before.
    """
    levels = live(row, held)
    first = next(n for n, action in enumerate(row, start=1) if action.kind in (BACKWARD, WEIGHT))
    before, after = max(levels[:first]), max(levels[first:], default=0.0)
    return (before, 0.0) if before > after + gradients else (after, gradients)


def stage_memory(stage: StepOperations, layout: Layout) -> Memory:
    """The same, of the first rank, by what its schedule holds at once: of 1f1b p micro-batches of a
    stage, interleaved 1 + (1 - 1/p)/v times as many, of zbv as many (docs/pipeline.md).
    """
    ranks, keeps = layout.pipeline, kept(stage)
    per_rank = stages_per_rank(layout.schedule, layout.per_rank)
    factor = 1 + (1 - 1 / ranks) / per_rank if layout.schedule == "interleaved" else 1.0
    live = min(layout.microbatches, ranks) * factor
    base = _held(stage, layout, accumulates=True)
    parts = {
        **_resident([stage], base),
        "activations in flight": live * keeps.total,
        "temporaries": of_block_backward(stage) + keeps.again,
        "buffers of transfers": 4 * stage.stream_bytes,
    }
    return _memory(base, parts, "rank 0", layout, boxes_of(stage))


def _resident(stages: Sequence[StepOperations], base: "_Held") -> dict[str, float]:
    """Gradients of a rank's stages and, of ZeRO 3, what is whole from UNSHARD to RESHARD."""
    if not base.unit:
        return {"gradients": base.gradients}
    whole = sum(_allocated(stage, stage.how.weight) for stage in stages)
    return {"gradients": base.gradients + whole, "unsharded weights": whole}


@dataclasses.dataclass(frozen=True)
class _Held:
    """Bytes that a rank has all the time, and how many its gradients come to.

    ends, unit  of ZeRO 3, the whole weights of embedding and head, and those of a block
    """

    parameters: float
    ends: float
    state: float
    gradients: float
    unit: float


def _held(operations: StepOperations, layout: Layout, *, accumulates: bool) -> _Held:
    """Whole gradients add up before ZeRO 2 gives them to their owners; ZeRO 3 reduces each time."""
    wrapper, n = WRAPPERS[layout.wrapper], layout.num_replicas
    how, state = operations.how, STATE_BYTES[operations.spec.precision]

    def of(part: str, itemsize: float) -> float:
        whole = _allocated(operations, itemsize)
        if part == "gradients" and accumulates and not wrapper.shards("weights"):
            return whole
        if not wrapper.shards(part) or n == 1:
            return whole
        if wrapper.shards("weights"):  # equal slices of each
            return whole / n
        return whole * most_owned(operations, n) / operations.num_parameters

    sharded = wrapper.shards("weights") and n > 1
    unit = operations.block_parameters * how.activation
    ends = operations.end_parameters * how.activation
    return _Held(
        parameters=of("weights", how.weight),
        ends=ends if sharded else 0.0,
        state=2 * of("optimizer state", state / 2),
        gradients=of("gradients", how.weight),
        unit=unit if sharded else 0.0,
    )


def _allocated(operations: StepOperations, itemsize: float) -> float:
    """Bytes of a value for each of the share's parameters. The caching allocator leaves a large
    tensor a rest of up to 1 MiB of its segment.
    """
    matrices = operations.block_matrices * len(operations.blocks) + operations.end_matrices
    rest = operations.num_parameters - sum(matrices)
    slack = 0.0
    for numel in matrices:
        size = numel * itemsize
        spare = round_up(int(size), SEGMENT_ROUNDING) - size
        slack += spare if size >= LEAST_OWN_SEGMENT and spare <= LARGEST_SMALL else 0.0
    return slack + (sum(matrices) + rest) * itemsize


def _sum(parts: Sequence[_Held]) -> _Held:
    names = [field.name for field in dataclasses.fields(_Held)]
    return _Held(**{name: sum(getattr(part, name) for part in parts) for name in names})


def _levels(
    operations: StepOperations, held: _Held, keeps: KeptBytes, before: float
) -> dict[str, dict[str, float]]:
    """What there is beside parameters and state, at each moment that may be the peak. Gradients of
    `before` bytes are there from earlier passes.
    """
    layers, gradients = len(operations.blocks), held.gradients
    one = gradients * operations.block_parameters / operations.num_parameters
    end = gradients * operations.end_parameters / operations.num_parameters
    head = end / 2 if operations.is_first and operations.is_last else end
    inside = of_block_backward(operations) + keeps.again
    gathered = 1 + PREFETCHED  # of ZeRO 3, beside whole gradients on their way
    first_units, last_units = (gathered + 1) * held.unit, (gathered + MOST_IN_FLIGHT) * held.unit
    # blocks whose backward begins together, when their activations are all there
    recomputes = operations.spec.checkpointing in ("blocks", "selective")
    together = min(layers, operations.spec.checkpoint_blocks) if recomputes else 1
    last = keeps.blocks * together / layers

    def level(of_gradients: float, kept_bytes: float, temporary: float) -> dict[str, float]:
        return {
            "gradients": max(before, of_gradients),
            "activations": kept_bytes,
            "temporaries": temporary,
        }

    levels = {
        "loss": level(0.0, keeps.total, of_loss(operations)),
        "first block of backward": level(head, keeps.blocks, inside + first_units),
        "last block of backward": level(
            head + (layers - together) * one, last, inside + last_units
        ),
        "end of backward": level(gradients, 0.0, operations.stream_bytes + last_units),
    }
    if operations.spec.checkpointing != "none":
        # a loss by parts holds most in forward; another has narrow logits, half of their gradients
        part = 1.0 if operations.share.tensor > 1 else 0.5
        # compiled blocks make their copies of weights again
        copies = 0.0 if operations.how.is_compiled else layers * narrow_copies(operations)
        levels["end of forward"] = level(0.0, keeps.total, copies + part * of_loss(operations))
    return levels


def _for_weights(stage: StepOperations) -> float:
    """What W needs of a micro-batch: both factors of every layer's product."""
    m, a, model = stage.tokens, stage.how.activation, stage.model
    n = stage.share.tensor
    up = (2 if model.is_gated else 1) * model.d_ff // n
    rows = stage.qkv_rows + model.d_model + up + model.d_model
    columns = 2 * model.d_model + model.num_heads * model.head_width // n + model.d_ff // n
    found = len(stage.blocks) * m * a * (rows + columns)
    if stage.is_last:
        found += m * a * (model.vocab_size // n + model.d_model)
    return min(found, kept(stage).total)


def boxes_of(operations: StepOperations) -> float:
    """Of the tensor axis, where it sends beside products: two inboxes and two outboxes, which are
    outside of the caching allocator (parallel/tensor_parallel/exchange.py).
    """
    whole = operations.tokens * operations.model.d_model * operations.how.activation
    return 4 * whole if operations.overlapped else 0.0


def _memory(
    base: _Held, parts: Mapping[str, float], moment: str, layout: Layout, boxes: float
) -> Memory:
    items = [
        Item("parameters", base.parameters),
        Item("gathered embedding and head", 0.0 if "unsharded weights" in parts else base.ends),
        Item("optimizer state", base.state),
        *(Item(name, nbytes) for name, nbytes in parts.items()),
        Item("workspaces of libraries", WORKSPACES, ASSUMED),
    ]
    outside = [Item("CUDA context", CUDA_CONTEXT, ASSUMED)]
    if boxes:
        outside.append(Item("boxes of the tensor axis", boxes))
    if layout.sizes:
        outside.append(Item("communicators", COMMUNICATOR * len(layout.sizes), ASSUMED))
    return Memory([item for item in items if item.bytes], outside, moment)
