"""Calibration of whole blocks: a network is timed with few blocks, at the shapes of a step.

The difference between two depths is the time of one block. It predicts steps of the same network
at any depth and under any layout that leaves the work within a block unchanged. This is more exact
than adding up operations that were timed one by one.
"""

import dataclasses
from typing import Any, ClassVar

from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.fields import option
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import BUDGET, TRAINING_PHASES, WorkSpec

LAYERS = (2, 5)  # the depths that are timed
# The time of a phase until the host has launched it, and until the device has computed it.
CLOCKS = ("host", "device")
# Axes of the table: phase is an index into TRAINING_PHASES, clock one into CLOCKS.
AXES = ("layers", "phase", "clock")
WORK_FIELDS = ("precision", "compile", "optimizer", "checkpointing", "checkpoint_blocks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlocksSpec(WorkSpec):
    """One record of `validate --blocks`: a step at each depth in LAYERS, on all ranks at once.

    batch  sequences per data rank
    """

    kind: ClassVar[str] = "blocks"

    cut: str = option(
        "none", "Part of the layout that acts within a block: tp2, or dp2 zero3", label=True
    )
    ranks: int = option(1, "Ranks that time it at the same time", least=1, most=100_000, label=True)

    @property
    def operation(self) -> str:
        return _operation(self, self.cut, self.ranks)


def inside_of_blocks(layout: Layout) -> Layout:
    """Returns the part of the layout that acts within a block.

    That is tensor parallelism, and sharded weights if they are gathered for each block. (A pipeline
    stage gathers its weights once per step, outside of the blocks.)
    """
    gathers_weights = WRAPPERS[layout.wrapper].shards("weights") and layout.pipeline == 1
    data, wrapper = (layout.data, layout.wrapper) if gathers_weights else (1, "none")
    return Layout(data=data, wrapper=wrapper, tensor=layout.tensor, overlap=layout.overlap)


def operation_of(work: WorkSpec, layout: Layout) -> str:
    """Returns the name of the table with the block times of such a step under the layout."""
    return _operation(work, *_cut_and_ranks(layout))


def _cut_and_ranks(layout: Layout) -> tuple[str, int]:
    """Returns the layout within a block as text, and the number of ranks that time it together."""
    inside = inside_of_blocks(layout)
    return str(inside), inside.ranks if inside.ranks > 1 else layout.ranks


def _operation(work: WorkSpec, cut: str, ranks: int) -> str:
    model = work.model
    assert isinstance(model, ModelSpec)
    changed = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.name != "num_layers" and getattr(model, field.name) != field.default
    }
    settings = {name: getattr(work, name) for name in WORK_FIELDS}
    named = {"cut": cut, "ranks": ranks, "batch": work.batch, **settings, **changed}
    return " ".join(["blocks", *(f"{name}={value}" for name, value in named.items())])


def whole_weights(layout: Layout) -> Layout:
    """Returns the layout with unsharded weights: ZeRO 3 is replaced by plain data parallel."""
    is_whole = not WRAPPERS[layout.wrapper].shards("weights")
    return layout if is_whole else dataclasses.replace(layout, wrapper="bucketed")


def blocks_of(spec: Any) -> list[BlocksSpec]:
    """Returns the block measurements that a prediction of the step can use.

    Data parallel wrappers with unsharded weights and pipeline stages all use the same measurement.
    A wrapper that shards weights needs two: with and without gathering them.
    Returns [] for anything but a whole step, for context parallelism, for torch's own tensor
    parallelism, for networks of no more than max(LAYERS) blocks, and for a user's model.
    """
    model, layout = spec.model, spec.parsed_layout
    if not isinstance(model, ModelSpec) or model.num_layers <= max(LAYERS):
        return []
    is_step = spec.phases == "step" and spec.checkpointing != BUDGET
    if not is_step or layout.context > 1 or layout.torch_tensor:
        return []
    settings = {name: getattr(spec, name) for name in WORK_FIELDS}
    shallow = dataclasses.replace(model, num_layers=max(LAYERS))
    specs = []
    for each in (layout, whole_weights(layout)):
        cut, ranks = _cut_and_ranks(each)
        specs.append(
            BlocksSpec(
                model=shallow,
                size=spec.size,
                batch=spec.micro_batch,
                device=spec.device,
                cut=cut,
                ranks=ranks,
                **settings,
            )
        )
    return list(dict.fromkeys(specs))


@dataclasses.dataclass(frozen=True)
class TimedBlocks:
    """Microseconds by phase and clock: of one block, and of everything outside of the blocks."""

    table: OperationTable

    def _at(self, layers: int, phase: str, clock: str) -> float:
        key = layers, TRAINING_PHASES.index(phase), CLOCKS.index(clock)
        return next(us for *sizes, us in self.table.rows if tuple(sizes) == key)

    def block_us(self, phase: str, clock: str) -> float:
        few, many = LAYERS
        longer = self._at(many, phase, clock) - self._at(few, phase, clock)
        return max(0.0, longer / (many - few))

    def outside_us(self, phase: str, clock: str) -> float:
        few, _ = LAYERS
        return max(0.0, self._at(few, phase, clock) - few * self.block_us(phase, clock))
