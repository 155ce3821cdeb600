"""A network with few of its blocks, timed whole at the shapes of a step: the finer level of a
calibration, for steps of that network however many blocks they have and however they are spread.
"""

import dataclasses
from typing import Any, ClassVar

from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import BUDGET, WorkSpec

LAYERS = (2, 5)
PHASES = ("forward", "backward", "optimizer")
# What a phase takes until the host has launched it, and until the device has computed it.
CLOCKS = ("host", "device")
AXES = ("layers", "phase", "clock")  # of the table, the last two by their places above
WORK_FIELDS = ("precision", "compile", "optimizer", "checkpointing", "checkpoint_blocks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlocksSpec(WorkSpec):
    """What `validate --blocks` measures in one record: a step with each number of LAYERS."""

    kind: ClassVar[str] = "blocks"

    @property
    def operation(self) -> str:
        return operation_of(self)


def operation_of(work: WorkSpec) -> str:
    """The name of the table that has the blocks of a step."""
    model = work.network
    changed = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.name != "num_layers" and getattr(model, field.name) != field.default
    }
    how = {name: getattr(work, name) for name in WORK_FIELDS}
    named = {"batch": work.batch, **how, **changed}
    return " ".join(["blocks", *(f"{name}={value}" for name, value in named.items())])


def blocks_of(spec: Any) -> BlocksSpec | None:
    """The blocks of a step as one rank computes them: the same for all ways of data parallel
    training and for the stages of a pipeline. None where ranks share a layer or a sequence, for
    networks that are hardly deeper, and for those without a known shape.
    """
    model, layout = spec.model, getattr(spec, "axes", Layout())
    if not isinstance(model, ModelSpec) or model.num_layers <= max(LAYERS):
        return None
    is_whole = layout.tensor == layout.context == 1
    if not is_whole or getattr(spec, "phases", "step") != "step" or spec.checkpointing == BUDGET:
        return None
    how = {name: getattr(spec, name) for name in WORK_FIELDS}
    batch = getattr(spec, "micro_batch", spec.batch)
    return BlocksSpec(model=dataclasses.replace(model, num_layers=max(LAYERS)), size=spec.size,
                      batch=batch, device=spec.device, **how)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TimedBlocks:
    """Microseconds by phase and clock: of a block, and of all that is outside of blocks."""

    table: OperationTable

    def _at(self, layers: int, phase: str, clock: str) -> float:
        key = layers, PHASES.index(phase), CLOCKS.index(clock)
        return next(us for *sizes, us in self.table.rows if tuple(sizes) == key)

    def block_us(self, phase: str, clock: str) -> float:
        few, many = LAYERS
        longer = self._at(many, phase, clock) - self._at(few, phase, clock)
        return max(0.0, longer / (many - few))

    def outside_us(self, phase: str, clock: str) -> float:
        few, _ = LAYERS
        return max(0.0, self._at(few, phase, clock) - few * self.block_us(phase, clock))
