"""The device's time line: which kernel each moment went to, and why it stood still in between."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stepgauge.spec.step import TRAINING_PHASES
from stepgauge.trace.attribution import Work
from stepgauge.trace.events import Call, Trace
from stepgauge.trace.intervals import merged

HOST_BOUND = "host-bound: launched after the device had run dry"
SYNCHRONISED = "host-bound: the host had waited for the device before it launched"
DEPENDENCY = "waiting for communication or a transfer on another stream"
TURNAROUND = "between two kernels that were both launched in time"
UNKNOWN = "the trace has no launch for the next kernel"


BETWEEN = "(idle between steps)"  # stands for a kernel's name


class Moment(NamedTuple):
    """A kernel on the device's time line: `gap_us` idle before it, then `busy_us` in which no
    earlier one ran.

    A gap between two phases may be split: the part until the host ended the first phase is a Moment
    of that phase's last kernel, the part until the next step's first phase is of no phase. Such a
    Moment is not `new`: its kernel has, or will have, one of its own.
    """

    work: Work
    gap_us: float
    busy_us: float
    reason: str
    new: bool = True


@dataclasses.dataclass
class Edges:
    """What lies outside of the time line, in µs, over all cycles of the profiler: from the first
    step's begin on the host to the device's first work, and from its last work to the host's end.
    """

    lead_in: float = 0.0
    tail: float = 0.0


def time_line(trace: Trace, works: Iterable[Work], edges: Edges | None = None) -> Iterator[Moment]:
    """The kernels of the steps by when they began. Gaps and busy times add up to the time from the
    first one's begin to the last one's end; each belongs to the step that launched its kernel.
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
    """The parts of a gap that are not of the phase of the kernel that ends it."""
    if (before.step, before.phase) == (work.step, work.phase):
        return
    reason = _reason(work, now, before, marks.waits)
    ended = min(marks.ends.get((before.step, before.phase), now), work.start)
    if ended > now:
        yield Moment(before, ended - now, 0.0, reason, new=False)
        now = ended
    begun = min(marks.begins.get(work.step, now), work.start)
    if work.step != before.step and begun > now:
        rule = "idle from one step's last phase to the next one's first"
        outside = work._replace(name=BETWEEN, kind="host", rule=rule, phase="", range="")
        yield Moment(outside, begun - now, 0.0, reason, new=False)


class _Marks:
    """What the host marked: when phases began and ended, when it waited for the device."""

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
        """When each step's first phase began; nothing of a step without phases."""
        starts = [call.start for call in phases]
        result = {}
        for number, step in enumerate(self.trace.steps):
            index = bisect.bisect_left(starts, step.start)
            if index < len(starts) and starts[index] <= step.end:
                result[number] = starts[index]
        return result

    def _ends(self, phases: Sequence[Call]) -> dict[tuple[int, str], float]:
        """When the host ended each phase: at an event before the next one, if it recorded one."""
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
