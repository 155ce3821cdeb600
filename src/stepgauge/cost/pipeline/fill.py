"""Moves a schedule's W actions (weight gradients) to where its ranks would wait.

Published schedules assume that F, I and W take equally long, which is never the case.
"""

import collections
import dataclasses
import math

from stepgauge.cost.pipeline.timeline import Durations, simulate
from stepgauge.spec.plan.pipeline.action import FORWARD, INPUT, WEIGHT, Action, Schedule
from stepgauge.spec.plan.pipeline.check import check
from stepgauge.spec.plan.pipeline.depend import dependencies
from stepgauge.spec.plan.pipeline.lower import lower

# A W is started in a gap of at least this fraction of its duration. The rest of it delays what follows.
LEAST_GAP = 0.5


def fill_bubbles(schedule: Schedule, durations: Durations) -> Schedule:
    """Returns the schedule with each W in its rank's first gap, or the original if that is not shorter.

    F, B and I keep their order, and no rank holds more micro-batches than before. The result is not
    lowered. Raises ScheduleError for a schedule that cannot run.
    """
    original = schedule.compute
    filled = _Filling(original, durations, check(original).peak).run()
    filled_ms, original_ms = (
        simulate(lower(each), durations).step_ms for each in (filled, original)
    )
    return filled if filled_ms < original_ms else original


@dataclasses.dataclass
class _Rank:
    """The state of a rank while the schedule is built.

    queue      remaining actions except W
    most_held  number of micro-batches that it may hold
    ready      W actions whose I has run
    done       actions so far
    free_ms    when the last of them ends
    held       number of micro-batches that it holds then
    """

    queue: collections.deque[Action]
    most_held: float
    ready: collections.deque[Action] = dataclasses.field(default_factory=collections.deque)
    done: list[Action] = dataclasses.field(default_factory=list)
    free_ms: float = 0.0
    held: int = 0

    @property
    def is_full(self) -> bool:
        """True if it must free a micro-batch before its next action, a forward."""
        return bool(self.queue) and self.queue[0].kind == FORWARD and self.held >= self.most_held


class _Filling:
    """Builds a schedule in the order of time: the rank that is free first picks its next action."""

    def __init__(self, schedule: Schedule, durations: Durations, bounds: tuple[float, ...]):
        self._schedule, self._durations = schedule, durations
        self._ranks = [
            _Rank(collections.deque(action for action in row if action.kind != WEIGHT), most_held)
            for row, most_held in zip(schedule.ranks, bounds, strict=True)
        ]
        self._ends_ms: dict[Action, float] = {}
        self._reads = _reads_from_other_ranks(schedule, durations)

    def run(self) -> Schedule:
        while busy := [rank for rank in self._ranks if rank.queue or rank.ready]:
            self._advance(min(busy, key=lambda rank: rank.free_ms), busy)
        rows = tuple(tuple(rank.done) for rank in self._ranks)
        return dataclasses.replace(self._schedule, ranks=rows)

    def _advance(self, rank: _Rank, busy: list[_Rank]) -> None:
        """Runs an action of the rank that is free first, or lets the rank wait."""
        ready_ms = self._ready_ms(rank.queue[0]) if rank.queue else math.inf
        gap_ms = ready_ms - rank.free_ms
        weight = rank.ready[0] if rank.ready else None
        if weight and (rank.is_full or gap_ms > LEAST_GAP * self._durations.of(weight)):
            self._run(rank, rank.ready.popleft(), rank.free_ms)
        elif ready_ms < math.inf:
            self._run(rank, rank.queue.popleft(), max(rank.free_ms, ready_ms))
        else:  # its input is not scheduled yet: let the other ranks continue first
            later = [other.free_ms for other in busy if other.free_ms > rank.free_ms]
            if later:
                rank.free_ms = min(later)
            else:
                rank.free_ms += min(filter(None, self._durations.actions.values()))

    def _ready_ms(self, action: Action) -> float:
        """Returns when the action's inputs have arrived; infinity if they are not scheduled yet."""
        arrivals = [self._ends_ms.get(a, math.inf) + ms for a, ms in self._reads[action]]
        return max(arrivals, default=0.0)

    def _run(self, rank: _Rank, action: Action, start_ms: float) -> None:
        rank.done.append(action)
        self._ends_ms[action] = rank.free_ms = start_ms + self._durations.of(action)
        if action.kind == INPUT:
            rank.ready.append(action._replace(kind=WEIGHT))
        elif action.kind == FORWARD:
            rank.held += 1
        else:
            rank.held -= 1


def _reads_from_other_ranks(
    schedule: Schedule, durations: Durations
) -> dict[Action, list[tuple[Action, float]]]:
    """Returns the actions of other ranks that each action waits for, with the ms of the transfers."""
    waits = dependencies(lower(schedule, ahead=len(schedule.ranks[0])))
    computations = {action for _, action in schedule}
    reads: dict[Action, list[tuple[Action, float]]] = {}
    for action in computations:
        reads[action] = []
        for other in waits[action]:
            if other in computations:
                source, ms = other, 0.0
            else:
                source, ms = _source(waits[other], other), durations.of(other)
            if schedule.rank_of[source.stage] != schedule.rank_of[action.stage]:
                reads[action].append((source, ms))
    return reads


def _source(waits: list[Action], transfer: Action) -> Action:
    """Returns the computation whose result is transferred."""
    sent = transfer.stage, transfer.micro_batch
    sources = [a for a in waits if a.is_compute and (a.stage, a.micro_batch) == sent]
    return sources[-1]
