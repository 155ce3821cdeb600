"""What the works of a step come to: its phases, and of each axis what is exposed."""

import dataclasses
from collections.abc import Mapping

from stepgauge.cost.contention import NoContention
from stepgauge.cost.events import COMPUTE, HOST, Contending, alone_us, simulate
from stepgauge.cost.program import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Milliseconds.

    phases         of forward, backward, synchronize, optimizer; passes before the last are in none
    communication  of each axis, with nothing beside it
    exposed        of each axis, while nothing is computed
    slowed         by which computing takes longer beside communication
    """

    step_ms: float
    phases: Mapping[str, float]
    device_ms: float
    communication: Mapping[str, float]
    exposed: Mapping[str, float]
    slowed_ms: float


def outcome(program: Program, contention: Contending) -> Outcome:
    """The program run."""
    ran = simulate(program.works, contention)
    ends = {phase: ran[place].end / 1e3 for phase, place in program.ends.items()}
    phases, before = {}, 0.0
    for phase, end in ends.items():
        phases[phase], before = end - before, end
    streams = sorted({work.stream for work in program.works} - {COMPUTE, HOST})
    computing = sum(work.us for work in program.works if work.stream == COMPUTE)
    taken = sum(r.end - r.start for r in ran if r.work.stream == COMPUTE)
    return Outcome(
        step_ms=max(r.end for r in ran) / 1e3,
        phases=phases,
        device_ms=computing / 1e3,
        communication={
            stream: sum(w.us for w in program.works if w.stream == stream) / 1e3
            for stream in streams
        },
        exposed={stream: alone_us(ran, stream) / 1e3 for stream in streams},
        slowed_ms=max(0.0, taken - computing) / 1e3,
    )


def silent_ms(program: Program, axis: str) -> float:
    """Of the step with nothing sent on the axis, its only one."""
    works = [w._replace(us=0.0) if w.stream == axis else w for w in program.works]
    return max(r.end for r in simulate(works, NoContention())) / 1e3
