"""What the host takes to launch a step, from steps that were so narrow that the GPU always waited."""

import math
import re

from stepgauge.cost.operations.supported import RECOMPUTED
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.streams.program import Launching
from stepgauge.cost.timed_blocks import timed_blocks
from stepgauge.spec.calibration import KEEPING, OperationTable, launched_under
from stepgauge.spec.layout import Layout
from stepgauge.spec.step import TRAINING_PHASES, WorkSpec

# Under selective checkpointing torch asks a Python function of each operator of a block, in
# forward and when it is computed again: its host takes so many times as long (an eager block of a
# narrow network on a CPU: 1073 for 184 us, docs/log/2026-11-23-predicted-again.md).
ASKED_OF_EACH = 5.8
RANKS = re.compile(r"(?<= [dct]p)\d+")  # of an axis, in a table's name


def own_table(spec: WorkSpec, machine: CalibratedMachine, layout: Layout) -> OperationTable | None:
    """Of steps under what the host launches otherwise than one process does, a wrapper's hooks among
    it: with what checkpointing asks of it, or else without; None where nothing is, or was not timed.
    """
    known = dict.fromkeys(launched_under(layout, how) for how in (spec.checkpointing, "none"))
    found = (_table(spec, machine, under) for under in known if under)
    return next(filter(None, found), None)


def _table(spec: WorkSpec, machine: CalibratedMachine, under: str = "") -> OperationTable | None:
    """Of compiled blocks as of one compiled network, where they were not timed."""
    mode = {"off": "eager", "blocks": "blocks"}.get(spec.compile, "compiled")
    casts = spec.precision in ("bf16", "fp16") or mode != "eager"
    names = [f"host {m} {'bf16' if casts else 'fp32'}{under}" for m in (mode, "compiled")]
    known = names if mode != "eager" else names[:1]
    return next((table for name in known if (table := _of_any_ranks(machine, name))), None)


def _of_any_ranks(machine: CalibratedMachine, name: str) -> OperationTable | None:
    """Ranks launch alike, however many there are: where these were not timed, those nearest to
    them in number.
    """

    def alike(other: str) -> bool:
        return RANKS.sub("", other) == RANKS.sub("", name)

    def apart(other: str) -> float:
        pairs = zip(RANKS.findall(other), RANKS.findall(name), strict=True)
        return sum(abs(math.log(int(a) / int(b))) for a, b in pairs)

    found = min(filter(alike, machine.operations), key=apart, default=name)
    return machine.table(found)


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
    with_asking = launched_under(layout or Layout(), spec.checkpointing)
    if spec.checkpointing in KEEPING and _table(spec, machine, with_asking):
        return found
    return _with_checkpointing(spec, found)


def _with_checkpointing(spec: WorkSpec, found: dict[str, Launching]) -> dict[str, Launching]:
    """What blocks launch that are computed again, and what eager ones take of the host whose
    operators are asked whether they are kept.
    """
    forward, backward = found["forward"], found["backward"]
    is_asked = spec.checkpointing in KEEPING and spec.compile == "off"
    block_us = forward.block_us * (ASKED_OF_EACH if is_asked else 1.0)
    again_us = RECOMPUTED[spec.checkpointing] * block_us
    return {
        **found,
        "forward": Launching(block_us, forward.outside_us),
        "backward": Launching(backward.block_us + again_us, backward.outside_us),
    }
