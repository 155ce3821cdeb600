"""The device's time line: which kernel each moment went to, and why it stood still in between."""

import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stepgauge.measure.trace.events import Trace
from stepgauge.measure.trace.intervals import merged
from stepgauge.measure.trace.work import PHASES, Work

HOST_BOUND = "host-bound: launched after the device had run dry"
SYNCHRONISED = "host-bound: the host had waited for the device before it launched"
DEPENDENCY = "waiting for communication or a transfer on another stream"
TURNAROUND = "between two kernels that were both launched in time"
UNKNOWN = "the trace has no launch for the next kernel"


class Moment(NamedTuple):
    """A kernel on the device's time line: `gap_us` idle before it, then `busy_us` in which no earlier one ran."""

    work: Work
    gap_us: float
    busy_us: float
    reason: str


class Span(NamedTuple):
    """A phase of one step on the device: from the end of the phase before to its own last kernel's end."""

    step: int
    phase: str
    us: float


def time_line(trace: Trace, works: Iterable[Work]) -> Iterator[Moment]:
    """Each step's kernels in order. Gaps and busy times of a step add up to its time on the device exactly."""
    waits = merged(
        (call.start, call.end)
        for calls in trace.threads.values()
        for call in calls
        if call.category == "runtime" and "Synchronize" in call.name
    )
    step, now, before = -1, 0.0, None
    for work in sorted(works, key=lambda work: (work.step, work.start)):
        if work.step != step:
            step, before = work.step, None
            now = origin(trace, work)
        gap = max(0.0, work.start - now)
        reason = _reason(work, now, before, waits) if gap > 0 else ""
        busy = max(0.0, work.end - max(work.start, now))
        yield Moment(work, gap, busy, reason)
        if work.end >= now:
            now, before = work.end, work


def origin(trace: Trace, first: Work) -> float:
    """When the step's first phase began on the host, or the step; its first kernel's start if that is earlier."""
    start, end = trace.steps[first.step]
    begun = [
        call.start
        for calls in trace.threads.values()
        for call in calls
        if call.category == "annotation" and call.name in PHASES and start <= call.start <= end
    ]
    return min([*begun, first.start]) if begun else min(start, first.start)


def _reason(work: Work, now: float, before: Work | None, waits: list[tuple[float, float]]) -> str:
    if work.launched is None:
        return UNKNOWN
    if work.launched >= now:
        index = bisect.bisect_right(waits, (now, float("inf"))) - 1
        waited = index >= 0 and waits[index][1] >= now
        return SYNCHRONISED if waited else HOST_BOUND
    if before is not None and before.stream != work.stream and before.kind in ("communication", "copy"):
        return DEPENDENCY
    return TURNAROUND


def spans(moments: Iterable[Moment]) -> list[Span]:
    """The phases of each step on the device's time line; they add up to the step."""
    found: dict[tuple[int, str], float] = {}
    for moment in moments:
        key = (moment.work.step, moment.work.phase)
        found[key] = found.get(key, 0.0) + moment.gap_us + moment.busy_us
    return [Span(step, phase, us) for (step, phase), us in found.items()]
