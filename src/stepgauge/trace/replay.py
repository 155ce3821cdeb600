"""The step played again by a model of host and device: its critical path, and what would be gained
if some of its work took no time.

The host goes from launch to launch and waits where it waited; a kernel starts once it is launched,
the kernel before it on its stream has ended, and so has what its stream was told to wait for. Which
kernel that was, the trace does not say: the last one launched on another stream before the wait, if
it had ended by then. A change therefore moves what really depends on it, and little else.
"""

import bisect
import dataclasses
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from stepgauge.spec.analysis import PathRow
from stepgauge.trace.attribution import Work
from stepgauge.trace.events import Trace

MOST_WORK = 20_000  # pieces: later steps of a longer trace are left out
HOST, DELAY = "host", "launch and turnaround"
NEAR_US = 1.0  # a wait for the device ends so soon after the kernel that it waited for


@dataclasses.dataclass(slots=True)
class _Event:
    """A launch or a wait of the host; `waited` is the kernel whose end it waited for, -1 for none."""

    start: float
    end: float
    waited: int = -1


class Replay:
    """Of one cycle's steps. Times are µs of the trace."""

    def __init__(self, trace: Trace, works: Sequence[Work]):
        self.works = _limited(trace, works)
        self.steps = len({work.step for work in self.works})
        self._begin = min(work.start for work in self.works)
        self._events, self._launch = self._host(trace)
        self._waiting = [n for n, event in enumerate(self._events) if event.waited >= 0]
        self._before = self._streams(trace)
        self._latency, self._turnaround = self._delays()
        self._measured = max(work.end for work in self.works) - self._begin

    def rows(self) -> list[PathRow]:
        """What the critical path consists of, the longest first, with each one's gain."""
        length, path = self._play("", trail=True)
        kinds = dict.fromkeys([*path, HOST, *(work.kind for work in self.works)])
        rows = []
        for kind in kinds:
            gain = max(0.0, length - self._play(kind)[0] if kind != DELAY else path[kind])
            if path.get(kind, 0.0) > 0 or gain > 0:
                rows.append(PathRow(what=kind, us=path.get(kind, 0.0), gain_us=gain))
        return sorted(rows, key=lambda row: (-row.us, -row.gain_us))

    @property
    def error(self) -> float:
        """The model's time over the measured one, -1."""
        return self._play("")[0] / self._measured - 1 if self._measured else 0.0

    def _host(self, trace: Trace) -> tuple[list[_Event], list[int]]:
        """The host's events in order, and for each kernel the event that launched it, -1 for none."""
        first, last = self.works[0], self.works[-1]
        launches = {work.launched for work in self.works if work.launched}
        least = min((start for start, _ in launches), default=first.start)
        waits = [
            (call.start, call.end) for call in trace.waits() if least <= call.start <= last.end
        ]
        events = [_Event(start, end) for start, end in sorted({*launches, *waits})]
        number = {(event.start, event.end): index for index, event in enumerate(events)}
        launch = [number[work.launched] if work.launched else -1 for work in self.works]
        by_end = sorted(range(len(self.works)), key=lambda index: self.works[index].end)
        ends = [self.works[index].end for index in by_end]
        for event in events:
            index = bisect.bisect_right(ends, event.end + NEAR_US) - 1
            if index >= 0 and ends[index] > event.start and event.end - event.start > NEAR_US:
                kernel = self.works[by_end[index]]
                if kernel.launched is None or kernel.launched[0] <= event.start:
                    event.waited = by_end[index]
        return events, launch

    def _streams(self, trace: Trace) -> list[list[int]]:
        """For each kernel those that had to end before it: of its stream, and of others where the
        host told the stream to wait.
        """
        waits = sorted(c.start for c in trace.calls("runtime") if "StreamWaitEvent" in c.name)
        latest: dict[tuple[int, int], int] = {}
        launched: dict[tuple[int, int], float] = defaultdict(lambda: float("-inf"))
        before: list[list[int]] = [[] for _ in self.works]
        order = sorted(
            range(len(self.works)),
            key=lambda i: (
                self.works[i].launched or (self.works[i].start, 0.0),
                self.works[i].start,
            ),
        )
        for index in order:
            work = self.works[index]
            asked = work.launched[0] if work.launched else work.start
            told = bisect.bisect_left(waits, asked) > bisect.bisect_left(
                waits, launched[work.stream]
            )
            for stream, other in latest.items():
                together = work.launched is not None and work.launched == self.works[other].launched
                if stream == work.stream or (
                    (told or together) and self.works[other].end <= work.start
                ):
                    before[index].append(other)
            latest[work.stream], launched[work.stream] = index, asked
        return before

    def _ready(self, index: int, ends: Sequence[float]) -> float:
        first = self._begin if self._launch[index] < 0 else float("-inf")
        return max((ends[other] for other in self._before[index]), default=first)

    def _delays(self) -> tuple[list[float], list[float]]:
        """From launch to start, and from what was waited for to start: measured where that bound
        the kernel, the median of those where the other did.
        """
        ends = [work.end for work in self.works]
        latency: list[float | None] = []
        turnaround: list[float | None] = []
        for index, work in enumerate(self.works):
            ready, event = self._ready(index, ends), self._launch[index]
            asked = self._events[event].start if event >= 0 else float("-inf")
            latency.append(work.start - asked if asked > ready else None)
            turnaround.append(work.start - ready if asked <= ready else None)
        result = []
        for delays in (latency, turnaround):
            known = [delay for delay in delays if delay is not None]
            usual = statistics.median(known) if known else 0.0
            result.append([usual if delay is None else delay for delay in delays])
        for index, work in enumerate(self.works):  # no later than it was
            event = self._launch[index]
            if event >= 0:
                asked = self._events[event].start
                result[0][index] = min(result[0][index], work.start - asked)
            result[1][index] = min(result[1][index], work.start - self._ready(index, ends))
        return result[0], result[1]

    def _play(self, without: str, *, trail: bool = False) -> tuple[float, dict[str, float]]:
        """The time from the first kernel's begin to the last one's end if that kind of work took no
        time; with `trail` the critical path's parts too.
        """
        ends = [0.0] * len(self.works)
        causes = [-1] * len(self.works)  # the kernel that it waited for, or -2 - the host's event
        asked: list[float] = []
        for index, work in enumerate(self.works):
            event = self._launch[index]
            while len(asked) <= event:
                asked.append(self._next(asked, ends, free=without == HOST))
            ready = self._ready(index, ends)
            start = max(self._begin, ready + self._turnaround[index])
            causes[index] = max(self._before[index], key=ends.__getitem__, default=-1)
            if event >= 0 and asked[event] + self._latency[index] > start:
                start, causes[index] = asked[event] + self._latency[index], -2 - event
            ends[index] = start + (0.0 if work.kind == without else work.us)
        last = max(range(len(ends)), key=ends.__getitem__)
        length = ends[last] - self._begin
        return length, self._trail(last, ends, causes, asked) if trail else {}

    def _next(self, asked: Sequence[float], ends: Sequence[float], *, free: bool) -> float:
        """When the host comes to its next event."""
        number = len(asked)
        event = self._events[number]
        if number == 0:
            return event.start
        before = self._events[number - 1]
        if before.waited >= 0 and ends[before.waited] > 0.0:
            spent = event.start - self.works[before.waited].end
            reached = max(asked[-1], ends[before.waited])
        else:
            spent, reached = event.start - before.start, asked[-1]
        return reached if free else reached + spent

    def _trail(
        self, last: int, ends: Sequence[float], causes: Sequence[int], asked: Sequence[float]
    ) -> dict[str, float]:
        parts: dict[str, float] = defaultdict(float)
        index, now = last, ends[last]
        while index >= 0:
            work, cause = self.works[index], causes[index]
            parts[work.kind] += min(work.us, now - self._begin)
            now -= work.us
            if cause >= 0:
                parts[DELAY] += max(0.0, now - ends[cause])
                index, now = cause, ends[cause]
                continue
            if cause == -1:
                break
            event = -2 - cause
            reached = max(self._begin, asked[event])
            parts[DELAY] += max(0.0, now - reached)
            index, since = self._waited_before(event, ends)
            parts[HOST] += max(0.0, reached - max(self._begin, since))
            now = since
        return dict(parts)

    def _waited_before(self, event: int, ends: Sequence[float]) -> tuple[int, float]:
        """The kernel for which the host last waited before that event, and its end; -1 for none."""
        index = bisect.bisect_left(self._waiting, event) - 1
        if index < 0 or ends[self._events[self._waiting[index]].waited] <= self._begin:
            return -1, self._begin
        waited = self._events[self._waiting[index]].waited
        return waited, ends[waited]


def _limited(trace: Trace, works: Sequence[Work]) -> list[Work]:
    """The first cycle's work by when it began, as many whole steps as the model may take."""
    run = trace.steps[min(work.step for work in works)].run
    mine = sorted(
        (work for work in works if trace.steps[work.step].run == run), key=lambda work: work.start
    )
    sizes = Counter(work.step for work in mine)
    taken = list(itertools.accumulate(sizes[step] for step in sorted(sizes)))
    last = sorted(sizes)[max(0, bisect.bisect_right(taken, MOST_WORK) - 1)]
    return [work for work in mine if work.step <= last]
