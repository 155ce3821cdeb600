"""A network with few of its blocks, timed whole at the shapes of a step: the finer level of a
calibration, for steps of that network however many blocks they have and however they are spread.
"""

import dataclasses
from typing import Any, ClassVar

from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.fields import option
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import BUDGET, TRAINING_PHASES, WorkSpec

LAYERS = (2, 5)
# What a phase takes until the host has launched it, and until the device has computed it.
CLOCKS = ("host", "device")
AXES = ("layers", "phase", "clock")  # of the table, the last two by their places above
WORK_FIELDS = ("precision", "compile", "optimizer", "checkpointing", "checkpoint_blocks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlocksSpec(WorkSpec):
    """What `validate --blocks` measures in one record: a step with each number of LAYERS, on ranks
    side by side. `batch` is that of a data rank.
    """

    kind: ClassVar[str] = "blocks"

    cut: str = option(
        "none", "what of a layout is inside of a block: tp2, or dp2 zero3", label=True
    )
    ranks: int = option(1, "that time it side by side", least=1, most=100_000, label=True)

    @property
    def operation(self) -> str:
        return _operation(self, self.cut, self.ranks)


def inside_of_blocks(layout: Layout) -> Layout:
    """What of the layout a block has to do with: layers that ranks share, and weights that they
    send (a stage of a pipeline has them for a step).
    """
    sends = WRAPPERS[layout.wrapper].shards("weights") and layout.pipeline == 1
    data = (layout.data, layout.wrapper) if sends else (1, "none")
    return Layout(data=data[0], wrapper=data[1], tensor=layout.tensor, overlap=layout.overlap)


def operation_of(work: WorkSpec, layout: Layout) -> str:
    """The name of the table that has the blocks of a step under the layout."""
    inside = inside_of_blocks(layout)
    return _operation(work, str(inside), inside.ranks if inside.ranks > 1 else layout.ranks)


def _operation(work: WorkSpec, cut: str, ranks: int) -> str:
    model = work.model
    assert isinstance(model, ModelSpec)
    changed = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.name != "num_layers" and getattr(model, field.name) != field.default
    }
    how = {name: getattr(work, name) for name in WORK_FIELDS}
    named = {"cut": cut, "ranks": ranks, "batch": work.batch, **how, **changed}
    return " ".join(["blocks", *(f"{name}={value}" for name, value in named.items())])


def whole_weights(layout: Layout) -> Layout:
    """The layout with weights that each rank has."""
    is_whole = not WRAPPERS[layout.wrapper].shards("weights")
    return layout if is_whole else dataclasses.replace(layout, wrapper="bucketed")


def blocks_of(spec: Any) -> list[BlocksSpec]:
    """The blocks of a step as its ranks compute them: the same for the ways of data parallel
    training that leave weights whole, and for the stages of a pipeline. Those that send their
    weights also with weights that are there. None where ranks share a sequence, for networks that
    are hardly deeper, and for those without a known shape.
    """
    model, layout = spec.model, spec.parsed_layout
    if not isinstance(model, ModelSpec) or model.num_layers <= max(LAYERS):
        return []
    is_step = spec.phases == "step" and spec.checkpointing != BUDGET
    if not is_step or layout.context > 1 or layout.torch_tensor:
        return []
    how = {name: getattr(spec, name) for name in WORK_FIELDS}
    few = dataclasses.replace(model, num_layers=max(LAYERS))
    asked = []
    for each in (layout, whole_weights(layout)):
        inside = inside_of_blocks(each)
        asked.append(
            BlocksSpec(
                model=few,
                size=spec.size,
                batch=spec.micro_batch,
                device=spec.device,
                cut=str(inside),
                ranks=inside.ranks if inside.ranks > 1 else layout.ranks,
                **how,
            )
        )
    return list(dict.fromkeys(asked))


@dataclasses.dataclass(frozen=True)
class TimedBlocks:
    """Microseconds by phase and clock: of a block, and of all that is outside of blocks."""

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
