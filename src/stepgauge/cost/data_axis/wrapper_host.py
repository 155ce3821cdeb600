"""The host's time for a data parallel wrapper: its hooks, and the calls of its collectives.

It was measured with networks so narrow that the GPU always waits, with the wrapper and without.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from stepgauge.cost.host import layout_table
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.timed_blocks import timed_blocks
from stepgauge.spec.calibration import WRAPPER_PHASES, OperationTable, wrapper_operation
from stepgauge.spec.hardware import SHIPPED, HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.step import WorkSpec

Row = tuple[float, float, float]  # parameters, messages, microseconds
REMEDY = "calibrate --ranks measures it"
LEFT_OUT = f"host cost not measured and left out ({REMEDY})"
TYPICAL_HOST = "h200-sxm"  # used for machines that have no times of their own for a wrapper


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
    """True if the host's times were measured under the wrapper itself."""
    if layout.launched.ranks == 1:
        return False
    is_timed = timed_blocks(work, machine, layout) is not None
    return is_timed or layout_table(work, machine, layout) is not None


def unknown_host(machine: CalibratedMachine, work: WorkSpec, layout: Layout) -> str:
    """Returns a note if the hardware file lacks host times that the layout needs; otherwise ""."""
    if work.device.startswith("cpu") or layout.ranks == 1 or _includes_hooks(work, machine, layout):
        return ""
    launched, wrapper = layout.launched, layout.wrapper
    if launched.tensor > 1 or launched.context > 1:
        return f"{LEFT_OUT}: {launched}"
    is_wrapped = wrapper != "none" and layout.num_replicas > 1
    if not is_wrapped or machine.table(wrapper_operation(wrapper)) is not None:
        return ""
    if _typical_table(wrapper) is None:
        return f"{LEFT_OUT}: {wrapper}"
    return f"host cost assumed to be that of {TYPICAL_HOST} ({REMEDY}): {wrapper}"


def _typical_table(wrapper: str) -> OperationTable | None:
    return _typical_host().operations.get(wrapper_operation(wrapper))


@functools.cache
def _typical_host() -> HardwareFile:
    return HardwareFile.read(SHIPPED / f"{TYPICAL_HOST}.json")


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
