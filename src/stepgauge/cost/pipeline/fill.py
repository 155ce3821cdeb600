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


class _Filling:
    """Runs all ranks through time: who is free first decides what it does next."""

    def __init__(self, schedule: Schedule, durations: Durations, bounds: tuple[float, ...]):
        self._schedule, self._durations, self._bounds = schedule, durations, bounds
        self._queues = [
            collections.deque(action for action in row if action.kind != WEIGHT)
            for row in schedule.ranks
        ]
        ranks = len(self._queues)
        self._weights: list[collections.deque[Action]] = [collections.deque() for _ in range(ranks)]
        self._rows: list[list[Action]] = [[] for _ in range(ranks)]
        self._free, self._held = [0.0] * ranks, [0] * ranks
        self._ends: dict[Action, float] = {}
        lowered = dependencies(lower(schedule, ahead=len(schedule.ranks[0])))
        own = {action for _, action in schedule}
        # What of other actions each waits for, and how long the transfer between them takes.
        self._reads = {
            action: [
                (source, durations.of(other) if other not in own else 0.0)
                for other in lowered[action]
                for source in ([other] if other in own else _source(lowered[other], own, other))
            ]
            for action in own
        }

    def run(self) -> Schedule:
        while any(self._queues) or any(self._weights):
            busy = [r for r in range(len(self._rows)) if self._queues[r] or self._weights[r]]
            rank = min(busy, key=self._free.__getitem__)
            self._advance(rank, [r for r in busy if r != rank])
        return dataclasses.replace(self._schedule, ranks=tuple(map(tuple, self._rows)))

    def _advance(self, rank: int, others: list[int]) -> None:
        """Runs the next action of the rank that is free first, or lets it wait."""
        queue, weights, now = self._queues[rank], self._weights[rank], self._free[rank]
        ready = self._ready(rank, queue[0]) if queue else math.inf
        full = bool(queue) and queue[0].kind == FORWARD and self._held[rank] >= self._bounds[rank]
        if weights and (full or ready - now > LEAST_GAP * self._durations.of(weights[0])):
            self._do(rank, weights.popleft(), now)
        elif ready < math.inf:
            self._do(rank, queue.popleft(), max(now, ready))
        else:  # the others go on first
            later = [self._free[other] for other in others if self._free[other] > now]
            self._free[rank] = min(later, default=now)
            if not later:
                self._free[rank] = now + min(filter(None, self._durations.actions.values()))

    def _ready(self, rank: int, action: Action) -> float:
        """When all that it reads is there; infinity where that is not known yet."""
        reads = [(s, t) for s, t in self._reads[action] if self._schedule.rank_of[s.stage] != rank]
        return max((self._ends.get(source, math.inf) + t for source, t in reads), default=0.0)

    def _do(self, rank: int, action: Action, start: float) -> None:
        self._rows[rank].append(action)
        self._ends[action] = self._free[rank] = start + self._durations.of(action)
        if action.kind == INPUT:
            self._weights[rank].append(action._replace(kind=WEIGHT))
        elif action.kind == FORWARD:
            self._held[rank] += 1
        else:
            self._held[rank] -= 1


def _source(waits: list[Action], own: set[Action], transfer: Action) -> list[Action]:
    """The computation that a transfer carries the result of."""
    return [a for a in waits if a in own and a.stage == transfer.stage
            and a.micro_batch == transfer.micro_batch][-1:]  # fmt: skip
