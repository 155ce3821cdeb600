"""Summarises a simulated step: its phases, and each axis's exposed communication."""

import dataclasses
from collections.abc import Mapping, Sequence

from stepgauge.cost.rates.contention import ContentionTable
from stepgauge.cost.rates.estimate import SLOWER_HOST
from stepgauge.cost.streams.events import (
    COMPUTE,
    HOST,
    StreamWork,
    WorkSpan,
    alone_us,
    simulate,
)
from stepgauge.cost.streams.program import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A simulated step, in milliseconds.

    phases         forward, backward and optimizer; of several passes, those of the last, with the
                   passes before it in forward
    device_ms      time of all computations without contention
    communication  per axis, the time of its messages without contention
    exposed        per axis, the time in which it communicates and nothing is computed; time in which
                   several axes communicate counts for the first one
    slowed_ms      time that contention adds to computations
    update_ms      the part of device_ms that the optimizer takes
    host           per phase, the time of the host
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
        """The delay of the step if the host were SLOWER_HOST times as slow, in microseconds."""
        delays = (SLOWER_HOST * ms - self.phases[phase] for phase, ms in self.host.items())
        return 1e3 * sum(max(0.0, ms) for ms in delays)

    def after(self, earlier: "Outcome", times: int) -> "Outcome":
        """Returns the outcome of `times` passes like `earlier`, followed by this one's program.

        The earlier passes are a part of the forward phase.
        """

        def total(own: float, of_each: float) -> float:
            return own + times * of_each

        def totals(own: Mapping[str, float], of_each: Mapping[str, float]) -> dict[str, float]:
            names = {**own, **of_each}
            return {name: total(own.get(name, 0.0), of_each.get(name, 0.0)) for name in names}

        return Outcome(
            step_ms=total(self.step_ms, earlier.step_ms),
            phases=totals(self.phases, {"forward": earlier.step_ms}),
            device_ms=total(self.device_ms, earlier.device_ms),
            communication=totals(self.communication, earlier.communication),
            exposed=totals(self.exposed, earlier.exposed),
            slowed_ms=total(self.slowed_ms, earlier.slowed_ms),
            update_ms=self.update_ms,
            host=totals(self.host, {"forward": sum(earlier.host.values())}),
        )


def run_program(program: Program, contention: ContentionTable, *, lead_us: float = 0.0) -> Outcome:
    """Simulates the program, whose host begins `lead_us` before its device."""
    spans = simulate(_with_lead(program.works, lead_us), contention)
    phases, previous_end = {}, 0.0
    for phase, index in program.ends.items():
        end = spans[index].end / 1e3
        phases[phase], previous_end = end - previous_end, end
    us: dict[str, float] = {}
    for work in program.works:
        us[work.stream] = us.get(work.stream, 0.0) + work.us
    communicators = sorted(us.keys() - {COMPUTE, HOST})
    computing_us = us.get(COMPUTE, 0.0)
    slowed_us = sum(s.end - s.start for s in spans if s.work.stream == COMPUTE) - computing_us
    return Outcome(
        step_ms=max(span.end for span in spans) / 1e3,
        phases=phases,
        device_ms=computing_us / 1e3,
        communication={stream: us[stream] / 1e3 for stream in communicators},
        exposed=_exposed_ms(spans, communicators),
        slowed_ms=max(0.0, slowed_us) / 1e3,
        update_ms=_update_us(program) / 1e3,
        host=_host_ms(program),
    )


def _with_lead(works: Sequence[StreamWork], lead_us: float) -> list[StreamWork]:
    """Returns the works without those of the host's first `lead_us`, in which it waits for nothing."""
    rest = list(works)
    for index, work in enumerate(works):
        if lead_us <= 0.0:
            break
        if work.stream == HOST:
            done_us = min(work.us, lead_us)
            lead_us -= done_us
            rest[index] = work._replace(us=work.us - done_us)
    return rest


def _host_ms(program: Program) -> dict[str, float]:
    """Returns the host's time in each phase. A phase begins where the one before has ended."""
    host_ms, first = {}, 0
    for phase, end in program.ends.items():
        works = (work for work in program.works[first:end] if work.stream == HOST)
        host_ms[phase], first = sum(work.us for work in works) / 1e3, end
    return host_ms


def _exposed_ms(spans: Sequence[WorkSpan], streams: Sequence[str]) -> dict[str, float]:
    """Returns the exposed time of each stream. Their sum is the time in which any is exposed."""
    exposed, before = {}, 0.0
    for number, stream in enumerate(streams, start=1):
        together = alone_us(spans, *streams[:number]) / 1e3
        exposed[stream], before = together - before, together
    return exposed


def _update_us(program: Program) -> float:
    """Returns the time of all computations after backward."""
    first = program.ends.get("backward", len(program.works))
    return sum(work.us for work in program.works[first:] if work.stream == COMPUTE)


def exposed_ms(step_ms: float, without_ms: float) -> float:
    """Returns by how much the messages of an axis lengthen the step, `without_ms` without them.

    0 if the step is no longer with them: without them, messages of another axis may run at the same
    time as kernels that they slow down more. Differences in the last digits of floats are rounded off.
    """
    return max(0.0, round(step_ms - without_ms, 9))


def without_communication_ms(program: Program, axis: str, contention: ContentionTable) -> float:
    """Returns the time of the step if its only axis sent nothing."""
    works = [w._replace(us=0.0) if w.stream == axis else w for w in program.works]
    return max(span.end for span in simulate(works, contention)) / 1e3
