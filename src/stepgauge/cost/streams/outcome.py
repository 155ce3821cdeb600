"""What the works of a step come to: its phases, and of each axis what is exposed."""

import dataclasses
from collections.abc import Mapping, Sequence

from stepgauge.cost.rates.contention import NoContention
from stepgauge.cost.rates.estimate import SLOWER_HOST
from stepgauge.cost.streams.events import COMPUTE, HOST, Contending, Ran, alone_us, simulate
from stepgauge.cost.streams.program import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Milliseconds.

    phases         of forward, backward, optimizer; passes before the last are in none
    communication  of each axis, with nothing beside it
    exposed        of each axis, while nothing is computed; where several are, of the first
    slowed         by which computing takes longer beside communication
    update         of device_ms, what the optimizer computes
    host           of each phase, what the host needs for it
    """

    step_ms: float
    phases: Mapping[str, float]
    device_ms: float
    communication: Mapping[str, float]
    exposed: Mapping[str, float]
    slowed_ms: float
    update_ms: float
    host: Mapping[str, float]

    @property
    def late_us(self) -> float:
        """By which the step takes longer where the host is slower: of each phase what the host then
        needs longer than the phase takes.
        """
        late = (SLOWER_HOST * ms - self.phases[phase] for phase, ms in self.host.items())
        return 1e3 * sum(max(0.0, ms) for ms in late)

    def with_more(self, before: "Outcome", passes: int) -> "Outcome":
        """Of so many passes more, each adding what the last one added to the outcome `before`."""

        def grown(now: float, then: float) -> float:
            return now + passes * (now - then)

        more_ms = passes * (self.step_ms - before.step_ms)
        return Outcome(
            step_ms=self.step_ms + more_ms,
            phases={**self.phases, "backward": self.phases["backward"] + more_ms},
            device_ms=grown(self.device_ms, before.device_ms),
            communication={
                axis: grown(ms, before.communication.get(axis, 0.0))
                for axis, ms in self.communication.items()
            },
            exposed={
                axis: grown(ms, before.exposed.get(axis, 0.0)) for axis, ms in self.exposed.items()
            },
            slowed_ms=grown(self.slowed_ms, before.slowed_ms),
            update_ms=self.update_ms,
            host={
                **self.host,
                "backward": self.host["backward"]
                + passes * (sum(self.host.values()) - sum(before.host.values())),
            },
        )


def outcome(program: Program, contention: Contending) -> Outcome:
    """The program run."""
    ran = simulate(program.works, contention)
    phases, before = {}, 0.0
    for phase, place in program.ends.items():
        end = ran[place].end / 1e3
        phases[phase], before = end - before, end
    us: dict[str, float] = {}
    for work in program.works:
        us[work.stream] = us.get(work.stream, 0.0) + work.us
    streams = sorted(us.keys() - {COMPUTE, HOST})
    computing_us = us.get(COMPUTE, 0.0)
    taken_us = sum(r.end - r.start for r in ran if r.work.stream == COMPUTE)
    return Outcome(
        step_ms=max(r.end for r in ran) / 1e3,
        phases=phases,
        device_ms=computing_us / 1e3,
        communication={stream: us[stream] / 1e3 for stream in streams},
        exposed=_exposed_ms(ran, streams),
        slowed_ms=max(0.0, taken_us - computing_us) / 1e3,
        update_ms=_update_us(program) / 1e3,
        host=_host_ms(program),
    )


def _host_ms(program: Program) -> dict[str, float]:
    """Of each phase, to which all works since the end of the phase before belong."""
    found, first = {}, 0
    for phase, place in program.ends.items():
        own = (work for work in program.works[first:place] if work.stream == HOST)
        found[phase], first = sum(work.us for work in own) / 1e3, place
    return found


def _exposed_ms(ran: Sequence[Ran], streams: Sequence[str]) -> dict[str, float]:
    """By stream, adding up to the time in which any of them is exposed."""
    found, before = {}, 0.0
    for number, stream in enumerate(streams, start=1):
        until = alone_us(ran, *streams[:number]) / 1e3
        found[stream], before = until - before, until
    return found


def _update_us(program: Program) -> float:
    """What is computed after the gradients are there."""
    first = program.ends.get("backward", len(program.works))
    return sum(work.us for work in program.works[first:] if work.stream == COMPUTE)


def exposed_ms(step_ms: float, without_ms: float) -> float:
    """Of a step and the same step without what an axis sends; 0 where it is no longer: without
    them the messages of another axis may meet kernels that they slow more. Sums of floats differ
    in the last digits, which are no time.
    """
    return max(0.0, round(step_ms - without_ms, 9))


def without_communication_ms(program: Program, axis: str) -> float:
    """Of the step with nothing sent on the axis, its only one."""
    works = [w._replace(us=0.0) if w.stream == axis else w for w in program.works]
    return max(r.end for r in simulate(works, NoContention())) / 1e3
