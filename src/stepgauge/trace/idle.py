"""The device's time line: which kernel each moment went to, and why it stood still in between."""

import bisect
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stepgauge.trace.attribution import PHASES, Work
from stepgauge.trace.events import Trace
from stepgauge.trace.intervals import merged

HOST_BOUND = "host-bound: launched after the device had run dry"
SYNCHRONISED = "host-bound: the host had waited for the device before it launched"
DEPENDENCY = "waiting for communication or a transfer on another stream"
TURNAROUND = "between two kernels that were both launched in time"
UNKNOWN = "the trace has no launch for the next kernel"


class Moment(NamedTuple):
    """A kernel on the device's time line: `gap_us` idle before it, then `busy_us` in which no
    earlier one ran.

    Of a gap between two phases, the part until the host ended the first one is a Moment of that
    phase's last kernel, which is not `new` there: the stopwatch too marks a phase's end when the
    host does.
    """

    work: Work
    gap_us: float
    busy_us: float
    reason: str
    new: bool = True


def time_line(trace: Trace, works: Iterable[Work]) -> Iterator[Moment]:
    """Each step's kernels in order. Gaps and busy times of a step add up to its time on the device
    exactly.
    """
    waits = merged(
        (call.start, call.end)
        for calls in trace.threads.values()
        for call in calls
        if call.category == "runtime" and "Synchronize" in call.name
    )
    origins, ends = _origins(trace), _phase_ends(trace)
    step, now, before = -1, 0.0, None
    for work in sorted(works, key=lambda work: (work.step, work.start)):
        if work.step != step:
            step, before = work.step, None
            now = min(origins[step], work.start)
        gap = max(0.0, work.start - now)
        reason = _reason(work, now, before, waits) if gap > 0 else ""
        if gap > 0 and before is not None and before.phase != work.phase:
            ended = min(max(now, ends.get((step, before.phase), now)), work.start)
            if ended > now:
                yield Moment(before, ended - now, 0.0, reason, new=False)
                gap, now = work.start - ended, ended
        busy = max(0.0, work.end - max(work.start, now))
        yield Moment(work, gap, busy, reason)
        if work.end >= now:
            now, before = work.end, work


def _origins(trace: Trace) -> list[float]:
    """When each step's first phase began on the host; where it has none, when the step began."""
    begun = sorted(
        call.start
        for calls in trace.threads.values()
        for call in calls
        if call.category == "annotation" and call.name in PHASES
    )
    result = []
    for start, end in trace.steps:
        index = bisect.bisect_left(begun, start)
        result.append(begun[index] if index < len(begun) and begun[index] <= end else start)
    return result


def _phase_ends(trace: Trace) -> dict[tuple[int, str], float]:
    """When the host ended each phase of each step: where it recorded an event before the next
    phase, with that.
    """
    calls = [call for thread in trace.threads.values() for call in thread]
    phases = sorted(
        (call for call in calls if call.category == "annotation" and call.name in PHASES),
        key=lambda call: call.start,
    )
    marks = sorted(
        (c.start, c.end) for c in calls if c.category == "runtime" and "EventRecord" in c.name
    )
    starts = [start for start, _ in trace.steps]
    result = {}
    for call, following in itertools.zip_longest(phases, phases[1:]):
        index = bisect.bisect_left(marks, (call.end, call.end))
        marked = index < len(marks) and (following is None or marks[index][0] < following.start)
        step = bisect.bisect_right(starts, call.start) - 1
        result[step, call.name] = marks[index][1] if marked else call.end
    return result


def _reason(work: Work, now: float, before: Work | None, waits: list[tuple[float, float]]) -> str:
    if work.launched is None:
        return UNKNOWN
    if work.launched >= now:
        index = bisect.bisect_right(waits, (now, float("inf"))) - 1
        waited = index >= 0 and waits[index][1] >= now
        return SYNCHRONISED if waited else HOST_BOUND
    if (
        before is not None
        and before.stream != work.stream
        and before.kind in ("communication", "copy")
    ):
        return DEPENDENCY
    return TURNAROUND
