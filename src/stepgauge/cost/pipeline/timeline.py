"""Simulates a lowered pipeline schedule from the durations of its actions and transfers.

A rank computes one action at a time, in the schedule's order. An action starts as soon as everything
that it waits for has ended (spec/plan/pipeline/depend.py). Transfers overlap with computation. A slow
host delays a rank: it issues the rank's computations one after another, and an action cannot start
before its first kernel is issued, nor end before its last one is.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from stepgauge.spec.plan.pipeline.action import (
    BACKWARD,
    FORWARD,
    INPUT,
    SENDS,
    WEIGHT,
    Action,
    Channel,
    Schedule,
    ScheduleError,
)
from stepgauge.spec.plan.pipeline.check import Held, changes
from stepgauge.spec.plan.pipeline.depend import dependencies, find_cycle, topological_order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Durations:
    """The duration of everything, in ms or any other unit; the timeline has the same.

    actions    by (stage, kind). A missing B takes as long as its I and W together; missing actions on
               weights take no time
    transfers  by channel; missing ones take no time
    launches   of the host, to issue a computation, by (stage, kind); a missing B takes as long as its I
               and W together, other missing ones no time. Transfers cost the host little
    """

    actions: Mapping[tuple[int, str], float]
    transfers: Mapping[Channel, float] = dataclasses.field(default_factory=dict)
    launches: Mapping[tuple[int, str], float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_stages(
        cls,
        stages: int,
        *,
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        transfer: float = 0.0,
        host_ms: float = 0.0,
        weights: Sequence[float] = (),
    ) -> Self:
        """Returns equal stages, or stages scaled by `weights`: 1.1 makes a stage 10 % longer. The host
        issues each computation in `host_ms`.

        Raises ValueError unless there is one weight per stage, for a time that is not a number of at
        least 0, and if no computation takes time.
        """
        times = {"forward": forward, "input": input, "weight": weight, "transfer": transfer}
        for name, ms in (times | {"host": host_ms}).items():
            if not 0 <= ms < math.inf:
                raise ValueError(f"{name} is {ms}; accepted are numbers of at least 0")
        if forward == input == weight == host_ms == 0:
            raise ValueError("forward is 0, and so are input, weight and host; one must be longer")
        if weights and len(weights) != stages:
            raise ValueError(f"weights has {len(weights)} values; there are {stages} stages")
        factors = weights or [1.0] * stages
        kinds = {FORWARD: forward, INPUT: input, WEIGHT: weight}
        actions = {
            (stage, kind): ms * factor
            for stage, factor in enumerate(factors)
            for kind, ms in kinds.items()
        }
        return cls(
            actions=actions,
            transfers=transfers_of(stages, transfer),
            launches=equal_launches(stages, host_ms),
        )

    def of(self, action: Action) -> float:
        """Returns the duration of an action. Raises ValueError for a computation without one."""
        stage, kind, _ = action
        if kind in SENDS:
            return self.transfers.get(action.channel, 0.0)
        if not action.is_compute:
            return self.actions.get((stage, kind), 0.0)
        try:
            return self.actions[stage, kind]
        except KeyError:
            if kind != BACKWARD:
                raise ValueError(f"no duration for {kind} of stage {stage}") from None
        return self.of(Action(stage, INPUT)) + self.of(Action(stage, WEIGHT))

    def launch_of(self, action: Action) -> float:
        """Returns the time in which the host issues an action."""
        stage, kind, _ = action
        if kind == BACKWARD and (stage, kind) not in self.launches:
            return self.launch_of(Action(stage, INPUT)) + self.launch_of(Action(stage, WEIGHT))
        return self.launches.get((stage, kind), 0.0)


def equal_launches(num_stages: int, ms: float) -> dict[tuple[int, str], float]:
    """Returns the launches of a host that issues every computation in `ms`."""
    kinds = (FORWARD, INPUT, WEIGHT, BACKWARD) if ms else ()
    return {(stage, kind): ms for stage in range(num_stages) for kind in kinds}


def transfers_of(num_stages: int, ms: float) -> dict[Channel, float]:
    """Returns transfers of `ms` between all neighbouring stages, in both directions."""
    stages = range(num_stages)
    return {Channel(stage, other): ms for stage in stages for other in (stage - 1, stage + 1)}


class Span(NamedTuple):
    """An action with its start and end, in ms from the start of the step."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When every action of a step ran, simulated or measured.

    ranks      the computations of each rank, in order
    transfers  by their SEND, from the moment at which both sides are ready
    """

    ranks: tuple[tuple[Span, ...], ...]
    transfers: tuple[Span, ...] = ()

    @functools.cached_property
    def step_ms(self) -> float:
        """The time from the start of the step to the end of the last computation."""
        return max(span.end for row in self.ranks for span in row)

    @functools.cached_property
    def busy_ms(self) -> list[float]:
        """For each rank, the time in which it computes."""
        return [sum(span.end - span.start for span in row) for row in self.ranks]

    @functools.cached_property
    def bubbles(self) -> list[float]:
        """For each rank, the fraction of the step in which it does not compute."""
        return [1.0 - busy / self.step_ms for busy in self.busy_ms]

    @property
    def over_ideal(self) -> float:
        """The step divided by one in which the work is spread evenly and no rank waits."""
        return self.step_ms * len(self.ranks) / sum(self.busy_ms)

    def held(self, held: Mapping[int, Held]) -> list[list[tuple[float, float]]]:
        """Returns for each rank how much its micro-batches hold over time, as pairs (ms, amount).

        There is a pair at the start and the end of each computation. Amounts have the unit of `held`;
        a stage that is missing there holds 1.
        """
        return [_levels(row, held) for row in self.ranks]


def _levels(row: Sequence[Span], held: Mapping[int, Held]) -> list[tuple[float, float]]:
    levels, level = [], 0.0
    for span, (taken, freed) in zip(row, changes((s.action for s in row), held), strict=True):
        levels += [(span.start, level + taken), (span.end, level + taken - freed)]
        level = levels[-1][1]
    return levels


class Simulator:
    """Simulates one lowered schedule with any durations.

    Raises ScheduleError for a schedule that is not lowered, or that deadlocks.
    """

    def __init__(self, schedule: Schedule):
        if not schedule.is_lowered and schedule.num_ranks > 1:
            raise ScheduleError("the schedule has no sends and receives; lower it first")
        self._schedule, self._waits = schedule, dependencies(schedule)
        if stuck := find_cycle(self._waits):
            raise ScheduleError(f"the schedule cannot end: {stuck[0]} waits for itself", stuck)
        self._order = topological_order(self._waits)

    def timeline(self, durations: Durations) -> Timeline:
        """Returns when each action runs."""
        issues = self._issues(durations)
        spans: dict[Action, Span] = {}
        for action in self._order:
            issue_start, issue_end = issues.get(action, (0.0, 0.0))
            ready = max((spans[other].end for other in self._waits[action]), default=0.0)
            start = max(ready, issue_start)
            spans[action] = Span(action, start, max(start + durations.of(action), issue_end))
        ranks = tuple(
            tuple(spans[action] for action in row if action.is_compute)
            for row in self._schedule.ranks
        )
        return Timeline(ranks, tuple(s for s in spans.values() if s.action.kind in SENDS))

    def _issues(self, durations: Durations) -> dict[Action, tuple[float, float]]:
        """Returns for each computation when its rank's host begins and ends to issue it; nothing if hosts
        take no time.
        """
        issues: dict[Action, tuple[float, float]] = {}
        if durations.launches:
            for row in self._schedule.compute.ranks:
                end = 0.0
                for action in row:
                    start, end = end, end + durations.launch_of(action)
                    issues[action] = start, end
        return issues


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Simulates a schedule once."""
    return Simulator(schedule).timeline(durations)
