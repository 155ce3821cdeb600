"""The simulator of pipeline schedules: the lowered schedule that runs, with a duration for each
action and each transfer, gives when everything happens.

A rank computes one action at a time, in its order; an action starts as soon as all that it waits
for has ended (spec/plan/pipeline/depend.py). Transfers run beside computation. The host may be the
slower one: it issues a rank's computations one after another; each starts when its first kernel may
be issued at the earliest, and ends when its last one is.
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
    """How long everything takes, in ms (or in any unit: the timeline is in the same).

    actions   of (stage, kind); a B that is not there takes its I and its W, work on weights that is
              not there takes nothing
    transfers of a channel; nothing where it is not there
    host_ms   that the host needs to issue one computation; a transfer costs it little
    """

    actions: Mapping[tuple[int, str], float]
    transfers: Mapping[Channel, float] = dataclasses.field(default_factory=dict)
    host_ms: float = 0.0

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
        """Stages that are alike but for `weights`, a factor a stage: 1.1 is a stage that takes a
        tenth longer. Raises ValueError for another number of them than stages, and for a time that
        is no number of at least 0.
        """
        times = {"forward": forward, "input": input, "weight": weight, "transfer": transfer}
        for name, ms in (times | {"host": host_ms}).items():
            if not 0 <= ms < math.inf:
                raise ValueError(f"{name} is {ms}; accepted are numbers of at least 0")
        if weights and len(weights) != stages:
            raise ValueError(f"weights has {len(weights)} values; there are {stages} stages")
        factors = weights or [1.0] * stages
        kinds = {FORWARD: forward, INPUT: input, WEIGHT: weight}
        actions = {
            (stage, kind): ms * factor
            for stage, factor in enumerate(factors)
            for kind, ms in kinds.items()
        }
        return cls(actions=actions, transfers=transfers_of(stages, transfer), host_ms=host_ms)

    def of(self, action: Action) -> float:
        """Raises ValueError for a computation that has no duration."""
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


def transfers_of(num_stages: int, ms: float) -> dict[Channel, float]:
    """That long on every channel of as many stages: from each to the one before and the one after."""
    stages = range(num_stages)
    return {Channel(stage, other): ms for stage in stages for other in (stage - 1, stage + 1)}


class Span(NamedTuple):
    """An action with its start and end, in ms from the begin of the step."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When every action of a step ran, as simulated or as measured.

    ranks      the computations of each rank, in their order
    transfers  from the moment that both sides are there to the end, by their SEND
    """

    ranks: tuple[tuple[Span, ...], ...]
    transfers: tuple[Span, ...] = ()

    @functools.cached_property
    def step_ms(self) -> float:
        """From the begin of the step to the end of the last computation."""
        return max(span.end for row in self.ranks for span in row)

    @property
    def busy_ms(self) -> list[float]:
        """Of each rank: the time in which it computes."""
        return [sum(span.end - span.start for span in row) for row in self.ranks]

    @property
    def bubbles(self) -> list[float]:
        """Of each rank: the share of the step in which it does not compute."""
        return [1.0 - busy / self.step_ms for busy in self.busy_ms]

    @property
    def over_ideal(self) -> float:
        """The step over one in which the same work is spread evenly and nobody waits."""
        return self.step_ms * len(self.ranks) / sum(self.busy_ms)

    def held(self, held: Mapping[int, Held]) -> list[list[tuple[float, float]]]:
        """Of each rank (ms, what its micro-batches hold from then on), in the unit of `held`: at the
        start and the end of each computation. A stage that is not in it holds 1.
        """
        return [_levels(row, held) for row in self.ranks]


def _levels(row: Sequence[Span], held: Mapping[int, Held]) -> list[tuple[float, float]]:
    levels, now = [], 0.0
    for span, (taken, freed) in zip(row, changes((s.action for s in row), held), strict=True):
        levels += [(span.start, now + taken), (span.end, now + taken - freed)]
        now = levels[-1][1]
    return levels


class Simulator:
    """A lowered schedule, to be simulated with any durations. Raises ScheduleError for one that
    cannot end.
    """

    def __init__(self, schedule: Schedule):
        if not schedule.is_lowered and schedule.num_ranks > 1:
            raise ScheduleError("the schedule has no sends and receives; lower it first")
        self._schedule, self._waits = schedule, dependencies(schedule)
        if stuck := find_cycle(self._waits):
            raise ScheduleError(f"the schedule cannot end: {stuck[0]} waits for itself", stuck)
        self._order = topological_order(self._waits)

    def timeline(self, durations: Durations) -> Timeline:
        """When each action runs."""
        host_ms = durations.host_ms
        begun = _begun(self._schedule, host_ms)
        spans: dict[Action, Span] = {}
        for action in self._order:
            issued = begun.get(action, -host_ms)  # transfers cost the host little
            ready = max((spans[other].end for other in self._waits[action]), default=0.0)
            start = max(ready, issued)
            spans[action] = Span(action, start, max(start + durations.of(action), issued + host_ms))
        ranks = []
        for row in self._schedule.ranks:
            ranks.append(tuple(spans[action] for action in row if action.is_compute))
        sends = tuple(span for span in spans.values() if span.action.kind in SENDS)
        return Timeline(tuple(ranks), sends)


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """`Simulator.timeline`, once."""
    return Simulator(schedule).timeline(durations)


def _begun(schedule: Schedule, host_ms: float) -> dict[Action, float]:
    """When the host of each rank begins to issue each computation."""
    begun: dict[Action, float] = {}
    if host_ms:
        for row in schedule.compute.ranks:
            begun |= {action: number * host_ms for number, action in enumerate(row)}
    return begun
