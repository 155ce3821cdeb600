"""A schedule's W actions placed again, where its ranks would wait: published schedules are drawn for
F, I and W that take alike, which no real stage has.
"""

import collections
import dataclasses
import math

from stepgauge.cost.pipeline.timeline import Durations, simulate
from stepgauge.spec.plan.pipeline.action import FORWARD, INPUT, WEIGHT, Action, Schedule
from stepgauge.spec.plan.pipeline.check import check
from stepgauge.spec.plan.pipeline.depend import dependencies
from stepgauge.spec.plan.pipeline.lower import lower

# A W begins in a gap of at least this part of it: it then delays what comes after by the rest.
LEAST_GAP = 0.5


def fill_bubbles(schedule: Schedule, durations: Durations) -> Schedule:
    """The schedule, not lowered, with each W in the first gap of its rank, and no more held at once
    than before; the schedule itself if that is not shorter.

    F, B and I keep their order. Raises ScheduleError for a schedule that cannot run.
    """
    plain = schedule.compute
    before = check(plain)
    filled = _Filling(plain, durations, before.peak).run()
    steps = [simulate(lower(made), durations).step_ms for made in (filled, plain)]
    return filled if steps[0] < steps[1] else plain


@dataclasses.dataclass
class _Rank:
    """A rank on its way through time.

    queue      its actions to come, without W
    most_held  micro-batches that it may hold
    weights    W to come whose I has run
    done       its actions so far
    free_ms    when the last of them ends
    held       micro-batches that it holds then
    """

    queue: collections.deque[Action]
    most_held: float
    weights: collections.deque[Action] = dataclasses.field(default_factory=collections.deque)
    done: list[Action] = dataclasses.field(default_factory=list)
    free_ms: float = 0.0
    held: int = 0

    @property
    def is_full(self) -> bool:
        """Whether it has to give something back before it goes on."""
        return bool(self.queue) and self.queue[0].kind == FORWARD and self.held >= self.most_held


class _Filling:
    """Runs all ranks through time: who is free first decides what it does next."""

    def __init__(self, schedule: Schedule, durations: Durations, bounds: tuple[float, ...]):
        self._schedule, self._durations = schedule, durations
        self._ranks = [
            _Rank(collections.deque(action for action in row if action.kind != WEIGHT), most_held)
            for row, most_held in zip(schedule.ranks, bounds, strict=True)
        ]
        self._ends_ms: dict[Action, float] = {}
        self._reads = _reads_from_other_ranks(schedule, durations)

    def run(self) -> Schedule:
        while busy := [rank for rank in self._ranks if rank.queue or rank.weights]:
            self._advance(min(busy, key=lambda rank: rank.free_ms), busy)
        rows = tuple(tuple(rank.done) for rank in self._ranks)
        return dataclasses.replace(self._schedule, ranks=rows)

    def _advance(self, rank: _Rank, busy: list[_Rank]) -> None:
        """Runs the next action of the rank that is free first, or lets it wait."""
        ready_ms = self._ready_ms(rank.queue[0]) if rank.queue else math.inf
        gap_ms = ready_ms - rank.free_ms
        weight = rank.weights[0] if rank.weights else None
        if weight and (rank.is_full or gap_ms > LEAST_GAP * self._durations.of(weight)):
            self._do(rank, rank.weights.popleft(), rank.free_ms)
        elif ready_ms < math.inf:
            self._do(rank, rank.queue.popleft(), max(rank.free_ms, ready_ms))
        else:  # the others go on first
            later = [other.free_ms for other in busy if other.free_ms > rank.free_ms]
            if later:
                rank.free_ms = min(later)
            else:
                rank.free_ms += min(filter(None, self._durations.actions.values()))

    def _ready_ms(self, action: Action) -> float:
        """When all that it reads is there; infinity where that is not known yet."""
        arrivals = [self._ends_ms.get(a, math.inf) + ms for a, ms in self._reads[action]]
        return max(arrivals, default=0.0)

    def _do(self, rank: _Rank, action: Action, start_ms: float) -> None:
        rank.done.append(action)
        self._ends_ms[action] = rank.free_ms = start_ms + self._durations.of(action)
        if action.kind == INPUT:
            rank.weights.append(action._replace(kind=WEIGHT))
        elif action.kind == FORWARD:
            rank.held += 1
        else:
            rank.held -= 1


def _reads_from_other_ranks(
    schedule: Schedule, durations: Durations
) -> dict[Action, list[tuple[Action, float]]]:
    """The actions of other ranks that each action waits for, with the ms of the transfer between."""
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
    """The computation that a transfer carries the result of."""
    of_result = (transfer.stage, transfer.micro_batch)
    found = [a for a in waits if a.is_compute and (a.stage, a.micro_batch) == of_result]
    return found[-1]
