"""What the host takes to launch a step, from steps that were so narrow that the GPU always waited."""

from stepgauge.cost.operations.supported import RECOMPUTED
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.streams.program import Launching
from stepgauge.cost.timed_blocks import timed_blocks
from stepgauge.spec.calibration import KEEPING, OperationTable, launched_under
from stepgauge.spec.layout import Layout
from stepgauge.spec.step import TRAINING_PHASES, WorkSpec


def own_table(spec: WorkSpec, machine: CalibratedMachine, layout: Layout) -> OperationTable | None:
    """Of steps under what the host launches otherwise than one process does and keeps all, a
    wrapper's hooks among it; None where nothing is, or was not timed.
    """
    under = launched_under(layout, spec.checkpointing)
    return _table(spec, machine, under) if under else None


def _table(spec: WorkSpec, machine: CalibratedMachine, under: str = "") -> OperationTable | None:
    """Of compiled blocks as of one compiled network, where they were not timed."""
    mode = {"off": "eager", "blocks": "blocks"}.get(spec.compile, "compiled")
    casts = spec.precision in ("bf16", "fp16") or mode != "eager"
    names = [f"host {m} {'bf16' if casts else 'fp32'}{under}" for m in (mode, "compiled")]
    known = names if mode != "eager" else names[:1]
    return next((table for name in known if (table := machine.table(name))), None)


def launching(
    spec: WorkSpec, machine: CalibratedMachine, layout: Layout | None = None
) -> dict[str, Launching]:
    """By phase; nothing on a CPU, where the host is the device, and nothing for a forward and
    backward that are CUDA graphs. Raises ValueError for a machine whose host was not timed.
    """
    if spec.device.startswith("cpu"):
        return {phase: Launching() for phase in TRAINING_PHASES}
    if timed := timed_blocks(spec, machine, layout or Layout()):
        return {
            phase: Launching(timed.block_us(phase, "host"), timed.outside_us(phase, "host"))
            for phase in TRAINING_PHASES
        }
    own = own_table(spec, machine, layout or Layout())
    table = own or _table(spec, machine)
    if table is None:
        raise ValueError(f"the hardware file {machine.hardware.name} has no host times")
    found = {}
    for number, phase in enumerate(TRAINING_PHASES):
        (few, short), (many, long) = sorted(
            (row[0], row[2]) for row in table.rows if row[1] == number
        )
        slope = (long - short) / (many - few)
        found[phase] = Launching(slope, short - slope * few)
    if spec.compile == "reduce-overhead":
        return {**found, "forward": Launching(), "backward": Launching()}
    is_counted = own is not None and spec.checkpointing in KEEPING
    again = 0 if is_counted else RECOMPUTED[spec.checkpointing] * found["forward"].block_us
    backward = found["backward"]
    found["backward"] = Launching(backward.block_us + again, backward.outside_us)
    return found
