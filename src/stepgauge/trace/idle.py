"""Builds the device's time line: busy time by kernel, and the reason of each idle gap."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stepgauge.spec.intervals import merged
from stepgauge.spec.step import TRAINING_PHASES
from stepgauge.trace.attribution import Work
from stepgauge.trace.events import Call, Trace

HOST_BOUND = "host-bound: the next kernel was launched too late"
SYNCHRONISED = "host-bound: the host waited for the device before the next launch"
DEPENDENCY = "waiting for communication or a transfer on another stream"
TURNAROUND = "between two kernels that were both launched in time"
UNKNOWN = "the launch of the next kernel is not in the trace"


BETWEEN = "(idle between steps)"  # used as the name of a kernel


class Moment(NamedTuple):
    """A kernel on the device's time line: `gap_us` of idle time, then `busy_us` in which no earlier
    kernel was running.

    A gap between two phases may be split: the part until the host ended the first phase counts for
    that phase's last kernel, the part until the next step's first phase for no phase. These parts
    are Moments that are not `new`, because their kernel also has a Moment of its own.
    """

    work: Work
    gap_us: float
    busy_us: float
    reason: str
    new: bool = True


@dataclasses.dataclass
class Edges:
    """Time outside the time line in µs, over all cycles of the profiler: from the begin of the first
    step on the host to the device's first work, and from its last work to the end on the host.
    """

    lead_in: float = 0.0
    tail: float = 0.0


def time_line(trace: Trace, works: Iterable[Work], edges: Edges | None = None) -> Iterator[Moment]:
    """Yields the kernels of the steps by start time. Gaps and busy times add up to the time from the
    first kernel's begin to the last one's end, and count in the step that launched the kernel.
    """
    marks, edges = _Marks(trace), edges or Edges()
    now, before = 0.0, None
    for work in sorted(works, key=lambda work: work.start):
        if before is None or trace.steps[work.step].run != trace.steps[before.step].run:
            if before is not None:
                edges.tail += max(0.0, trace.steps[before.step].end - now)
            edges.lead_in += max(0.0, work.start - marks.begin(work.step)) if trace.marked else 0.0
            now, before = work.start, None
        if before is not None and work.start > now:
            for moment in _gap(work, now, before, marks):
                now += moment.gap_us
                yield moment
        gap = max(0.0, work.start - now)
        reason = _reason(work, now, before, marks.waits) if gap > 0 else ""
        yield Moment(work, gap, max(0.0, work.end - max(work.start, now)), reason)
        if work.end >= now:
            now, before = work.end, work
    if before is not None and trace.marked:
        edges.tail += max(0.0, trace.steps[before.step].end - now)


def _gap(work: Work, now: float, before: Work, marks: "_Marks") -> Iterator[Moment]:
    """Yields the parts of a gap that do not count for the phase of the kernel after it."""
    if (before.step, before.phase) == (work.step, work.phase):
        return
    reason = _reason(work, now, before, marks.waits)
    ended = min(marks.ends.get((before.step, before.phase), now), work.start)
    if ended > now:
        yield Moment(before, ended - now, 0.0, reason, new=False)
        now = ended
    begun = min(marks.begins.get(work.step, now), work.start)
    if work.step != before.step and begun > now:
        rule = "idle from the last phase of one step to the first of the next"
        outside = work._replace(name=BETWEEN, kind="host", rule=rule, phase="", range="")
        yield Moment(outside, begun - now, 0.0, reason, new=False)


class _Marks:
    """Times on the host: when phases began and ended, and when it waited for the device."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.waits = merged((call.start, call.end) for call in trace.waits())
        phases = sorted(
            (call for call in trace.calls("annotation") if call.name in TRAINING_PHASES),
            key=lambda call: call.start,
        )
        self.begins = self._begins(phases)
        self.ends = self._ends(phases)

    def begin(self, step: int) -> float:
        return self.begins.get(step, self.trace.steps[step].start)

    def _begins(self, phases: Sequence[Call]) -> dict[int, float]:
        """Returns when the first phase of each step began. A step without phases has no entry."""
        starts = [call.start for call in phases]
        result = {}
        for number, step in enumerate(self.trace.steps):
            index = bisect.bisect_left(starts, step.start)
            if index < len(starts) and starts[index] <= step.end:
                result[number] = starts[index]
        return result

    def _ends(self, phases: Sequence[Call]) -> dict[tuple[int, str], float]:
        """Returns when the host ended each phase: at the event that it recorded before the next phase,
        if it did, else at the end of the phase's annotation.
        """
        events = sorted(
            (c.start, c.end) for c in self.trace.calls("runtime") if "EventRecord" in c.name
        )
        starts = [step.start for step in self.trace.steps]
        result = {}
        for call, following in itertools.zip_longest(phases, phases[1:]):
            index = bisect.bisect_left(events, (call.end, call.end))
            marked = index < len(events) and (
                following is None or events[index][0] < following.start
            )
            step = bisect.bisect_right(starts, call.start) - 1
            result[step, call.name] = events[index][1] if marked else call.end
        return result


def _reason(work: Work, now: float, before: Work | None, waits: list[tuple[float, float]]) -> str:
    if work.launched is None:
        return UNKNOWN
    if work.launched[0] >= now:
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
