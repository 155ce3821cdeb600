"""The host's time for a data parallel wrapper: its hooks, and the calls of its collectives.

It was measured with networks so narrow that the GPU always waits, with the wrapper and without.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from stepgauge.cost.host import TYPICAL_HOST, measured_launches, typical_host
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.timed_blocks import timed_blocks
from stepgauge.spec.calibration import WRAPPER_PHASES, OperationTable, wrapper_operation
from stepgauge.spec.layout import Layout
from stepgauge.spec.step import WorkSpec

Row = tuple[float, float, float]  # parameters, messages, microseconds
REMEDY = "calibrate --ranks measures it"
LEFT_OUT = f"host cost not measured and left out ({REMEDY})"
ASSUMED = f"host cost assumed to be that of {TYPICAL_HOST} ({REMEDY})"


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Host time of a phase in microseconds: per parameter, per message, and once.

    A message is a bucket, or for ZeRO 3 a unit that is gathered.
    """

    parameter_us: float = 0.0
    message_us: float = 0.0
    once_us: float = 0.0

    def us(self, parameters: int, messages: int) -> float:
        total = self.once_us + self.parameter_us * parameters + self.message_us * messages
        return max(0.0, total)


def hooks_of(
    machine: CalibratedMachine, wrapper: str, work: WorkSpec, layout: Layout
) -> Mapping[str, Hooks]:
    """Returns the hooks by phase.

    They cost nothing on a CPU, where the host is the device, and if the host's times of the step
    include them already. If the file does not have them, those of a typical host are assumed.
    """
    table = machine.table(wrapper_operation(wrapper)) or _typical_table(wrapper)
    if table is None or work.device.startswith("cpu") or _includes_hooks(work, machine, layout):
        return dict.fromkeys(WRAPPER_PHASES, Hooks())
    return {
        phase: _fitted([(row[0], row[1], row[3]) for row in table.rows if row[2] == number])
        for phase, number in WRAPPER_PHASES.items()
    }


def _includes_hooks(work: WorkSpec, machine: CalibratedMachine, layout: Layout) -> bool:
    """True if the host's times were measured under the wrapper itself, here or on a typical host."""
    launched = layout.launched
    if launched.ranks == 1:
        return False
    if timed_blocks(work, machine, layout) is not None:
        return True
    measured = measured_launches(work, machine, layout)
    return measured is not None and measured.part == launched


def unknown_host(
    machine: CalibratedMachine, work: WorkSpec, layout: Layout, *, replayed: bool
) -> str:
    """Returns a note if the hardware file lacks host times that the layout needs; otherwise "". A step
    that is replayed from CUDA graphs needs none.
    """
    if replayed:
        return ""
    if work.device.startswith("cpu") or layout.ranks == 1 or timed_blocks(work, machine, layout):
        return ""
    launched, measured = layout.launched, measured_launches(work, machine, layout)
    assumed, left_out = [], []
    if measured is None and (launched.tensor > 1 or launched.context > 1):
        return f"{LEFT_OUT}: {launched}"
    if measured and measured.is_typical:
        assumed.append(str(measured.part))
    if measured and launched.overlap and not measured.part.overlap:
        left_out.append("what overlap adds")
    is_wrapped = layout.wrapper != "none" and layout.num_replicas > 1
    needs_hooks = is_wrapped and not _includes_hooks(work, machine, layout)
    if needs_hooks and machine.table(wrapper_operation(layout.wrapper)) is None:
        (assumed if _typical_table(layout.wrapper) else left_out).append(layout.wrapper)
    notes = {ASSUMED: assumed, LEFT_OUT: left_out}
    return "; ".join(f"{head}: {', '.join(names)}" for head, names in notes.items() if names)


def _typical_table(wrapper: str) -> OperationTable | None:
    return typical_host().table(wrapper_operation(wrapper))


def _fitted(rows: Sequence[Row]) -> Hooks:
    """Fits the hooks to a small and a large network, and to the large one in more messages.

    If the file has no such third row, messages grow with the network only, and all growth is theirs.
    """
    small = min(rows)
    large_rows = sorted(row for row in rows if row[0] > small[0])
    large, split = large_rows[0], large_rows[-1]  # the same row if there is no third
    message_us = 0.0
    if split[1] > large[1]:
        message_us = max(0.0, (split[2] - large[2]) / (split[1] - large[1]))
    elif large[1] > small[1]:
        message_us = max(0.0, (large[2] - small[2]) / (large[1] - small[1]))
    growth_us = large[2] - small[2] - message_us * (large[1] - small[1])
    parameter_us = max(0.0, growth_us / (large[0] - small[0]))
    once_us = small[2] - parameter_us * small[0] - message_us * small[1]
    return Hooks(parameter_us, message_us, max(0.0, once_us))
