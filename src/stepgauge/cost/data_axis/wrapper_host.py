"""What a wrapper takes of the host beside the step itself: its hooks, and the calls of its
collectives. From networks so narrow that the GPU always waited, under the wrapper and without.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from stepgauge.cost.host import own_table
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.timed_blocks import timed_blocks
from stepgauge.spec.calibration import WRAPPER_PHASES, wrapper_operation
from stepgauge.spec.layout import Layout
from stepgauge.spec.step import WorkSpec

Row = tuple[float, float, float]  # parameters, messages, microseconds


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Microseconds of the host in a phase: of each parameter, of each message (of ZeRO 3: of each
    unit that is gathered), and once.
    """

    parameter_us: float = 0.0
    message_us: float = 0.0
    once_us: float = 0.0

    def us(self, parameters: int, messages: int) -> float:
        added = self.once_us + self.parameter_us * parameters + self.message_us * messages
        return max(0.0, added)


def hooks_of(
    machine: CalibratedMachine, wrapper: str, work: WorkSpec, layout: Layout
) -> Mapping[str, Hooks]:
    """By phase; nothing where the file does not say, where the host's times have them already, and
    on a CPU, where the host is the device.
    """
    is_cpu, table = work.device.startswith("cpu"), machine.table(wrapper_operation(wrapper))
    if table is None or is_cpu or _has_hooks(work, machine, layout):
        return dict.fromkeys(WRAPPER_PHASES, Hooks())
    return {
        phase: _fitted([(row[0], row[1], row[3]) for row in table.rows if row[2] == number])
        for phase, number in WRAPPER_PHASES.items()
    }


def _has_hooks(work: WorkSpec, machine: CalibratedMachine, layout: Layout) -> bool:
    """Whether steps or blocks were timed under the wrapper itself."""
    if layout.launched.ranks == 1:
        return False
    is_timed = timed_blocks(work, machine, layout) is not None
    return is_timed or own_table(work, machine, layout) is not None


def unknown_host(machine: CalibratedMachine, work: WorkSpec, layout: Layout) -> str:
    """A sentence where the hardware file lacks what the layout takes of the host; or ""."""
    if work.device.startswith("cpu") or layout.ranks == 1 or _has_hooks(work, machine, layout):
        return ""
    cut, wrapper = layout.launched, layout.wrapper
    is_wrapped = wrapper != "none" and layout.num_replicas > 1
    has_hooks = machine.table(wrapper_operation(wrapper)) is not None
    missing = wrapper if is_wrapped and not has_hooks else ""
    if cut.tensor > 1 or cut.context > 1:
        missing = str(cut)
    if not missing:
        return ""
    return f"host cost of {missing} not measured and left out (calibrate --ranks measures it)"


def _fitted(rows: Sequence[Row]) -> Hooks:
    """A plane through two sizes of a network, and where there is one, through the larger in more
    messages. Where messages grow with the network alone, all that grows is theirs.
    """
    few = min(rows)
    large = sorted(row for row in rows if row[0] > few[0])
    many, split = large[0], large[-1]
    message_us = 0.0
    if split[1] > many[1]:
        message_us = max(0.0, (split[2] - many[2]) / (split[1] - many[1]))
    elif many[1] > few[1]:
        message_us = max(0.0, (many[2] - few[2]) / (many[1] - few[1]))
    grown = many[2] - few[2] - message_us * (many[1] - few[1])
    parameter_us = max(0.0, grown / (many[0] - few[0]))
    once_us = few[2] - parameter_us * few[0] - message_us * few[1]
    return Hooks(parameter_us, message_us, max(0.0, once_us))
