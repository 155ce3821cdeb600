"""The host's time to launch a step, from steps of networks so narrow that the GPU always waits."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from stepgauge.cost.operations.supported import RECOMPUTED
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.streams.program import LaunchCost
from stepgauge.cost.timed_blocks import timed_blocks
from stepgauge.spec.calibration import KEEPING, OperationTable, launched_under
from stepgauge.spec.hardware import SHIPPED, HardwareFile
from stepgauge.spec.host_tables import nearest_operation
from stepgauge.spec.layout import Layout
from stepgauge.spec.step import TRAINING_PHASES, WorkSpec

# With selective checkpointing, torch calls a Python function for each operator of a block, in forward
# and again in recomputation. That makes the host take this many times as long (an eager block of a
# narrow network on a CPU: 1073 instead of 184 us, docs/log/2026-11-23-predicted-again.md).
SELECTIVE_HOST_FACTOR = 5.8
TYPICAL_HOST = "h200-sxm"  # for layouts and wrappers that a machine has no times of


@functools.cache
def typical_host() -> CalibratedMachine:
    return CalibratedMachine(HardwareFile.read(SHIPPED / f"{TYPICAL_HOST}.json").on_ranks(2))


def layout_table(
    spec: WorkSpec, machine: CalibratedMachine, layout: Layout
) -> OperationTable | None:
    """Returns the host times of steps measured under the layout, which include a wrapper's hooks.

    Prefers the spec's checkpointing, and falls back to none. Returns None if there is no such table,
    or if the host launches the layout like a single process.
    """
    suffixes = (launched_under(layout, mode) for mode in (spec.checkpointing, "none"))
    for suffix in filter(None, suffixes):
        if table := _table(spec, machine, suffix):
            return table
    return None


class MeasuredLaunches(NamedTuple):
    """Host times of steps that were measured under a part of a layout.

    is_typical  measured on the typical host, because the machine's file has none
    """

    part: Layout
    table: OperationTable
    is_typical: bool


def measured_launches(
    spec: WorkSpec, machine: CalibratedMachine, layout: Layout
) -> MeasuredLaunches | None:
    """Returns the times under the largest part of the layout that was measured; None if none was."""
    without_checkpointing = dataclasses.replace(spec, checkpointing="none")
    for part in _parts(layout.launched):
        if table := layout_table(spec, machine, part):
            return MeasuredLaunches(part, table, is_typical=False)
        if table := layout_table(without_checkpointing, typical_host(), part):
            return MeasuredLaunches(part, table, is_typical=True)
    return None


def _parts(launched: Layout) -> Iterator[Layout]:
    """Yields the layout, then its tensor axis only, then the tensor axis without overlap."""
    yield launched
    if launched.tensor > 1 and launched.context == 1:
        yield Layout(tensor=launched.tensor, overlap=launched.overlap)
        yield Layout(tensor=launched.tensor)


def _table(spec: WorkSpec, machine: CalibratedMachine, suffix: str = "") -> OperationTable | None:
    """Returns the host times; for compiled blocks, falls back to those of a compiled network."""
    mode = {"off": "eager", "blocks": "blocks"}.get(spec.compile, "compiled")
    is_bf16 = spec.precision in ("bf16", "fp16") or mode != "eager"
    for each in ("eager",) if mode == "eager" else (mode, "compiled"):
        name = f"host {each} {'bf16' if is_bf16 else 'fp32'}{suffix}"
        if table := machine.table(nearest_operation(name, machine.operations)):
            return table
    return None


def launch_costs(
    spec: WorkSpec, machine: CalibratedMachine, layout: Layout | None = None
) -> dict[str, LaunchCost]:
    """Returns the host's time by phase.

    It is 0 on a CPU, where the host is the device, and for a forward and backward in CUDA graphs. If
    the file has no times under the layout, the time that the layout adds on a typical host is added.
    Raises ValueError for a machine without host times.
    """
    if spec.device.startswith("cpu"):
        return {phase: LaunchCost() for phase in TRAINING_PHASES}
    layout = layout or Layout()
    if timed := timed_blocks(spec, machine, layout):
        return {
            phase: LaunchCost(timed.block_us(phase, "host"), timed.outside_us(phase, "host"))
            for phase in TRAINING_PHASES
        }
    measured = measured_launches(spec, machine, layout)
    is_own = measured is not None and not measured.is_typical
    table = measured.table if measured and is_own else _table(spec, machine)
    if table is None:
        raise ValueError(f"the hardware file {machine.hardware.name} has no host times")
    costs = _costs(table)
    if measured and measured.is_typical:
        costs = _with_typical_layout(spec, costs, measured.table)
    if spec.compile == "reduce-overhead":
        return {**costs, "forward": LaunchCost(), "backward": LaunchCost()}
    includes_checkpointing = spec.checkpointing in KEEPING and _table(
        spec, machine, launched_under(measured.part if measured else layout, spec.checkpointing)
    )
    return costs if includes_checkpointing else _with_checkpointing(spec, costs)


def _costs(table: OperationTable) -> dict[str, LaunchCost]:
    """Returns the host's time by phase from steps of few and of many blocks."""
    costs = {}
    for number, phase in enumerate(TRAINING_PHASES):
        (few, short), (many, long) = sorted(
            (row[0], row[2]) for row in table.rows if row[1] == number
        )
        block_us = (long - short) / (many - few)
        costs[phase] = LaunchCost(block_us, short - block_us * few)
    return costs


def _with_typical_layout(
    spec: WorkSpec, costs: dict[str, LaunchCost], table: OperationTable
) -> dict[str, LaunchCost]:
    """Adds what a layout with this table adds to a single process, on the typical host."""
    single_table = _table(spec, typical_host())
    assert single_table is not None, "the typical host has times of a single process"
    under_layout, single = _costs(table), _costs(single_table)
    return {
        phase: LaunchCost(
            max(0.0, cost.block_us + under_layout[phase].block_us - single[phase].block_us),
            cost.outside_us + under_layout[phase].outside_us - single[phase].outside_us,
        )
        for phase, cost in costs.items()
    }


def _with_checkpointing(spec: WorkSpec, costs: dict[str, LaunchCost]) -> dict[str, LaunchCost]:
    """Adds the launches of recomputed blocks, and the calls of selective checkpointing."""
    forward, backward = costs["forward"], costs["backward"]
    is_selective = spec.checkpointing in KEEPING and spec.compile == "off"
    block_us = forward.block_us * (SELECTIVE_HOST_FACTOR if is_selective else 1.0)
    recomputed_us = RECOMPUTED[spec.checkpointing] * block_us
    return {
        **costs,
        "forward": LaunchCost(block_us, forward.outside_us),
        "backward": LaunchCost(backward.block_us + recomputed_us, backward.outside_us),
    }
