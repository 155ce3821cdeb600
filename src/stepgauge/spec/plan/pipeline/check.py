"""Checks that a schedule can run, and computes how much memory it holds.

A schedule that fails raises ScheduleError with the actions that show why. The checks, in order:

- each stage runs each micro-batch forward and backward once;
- on each rank F comes before B or I, and I before W;
- a stage runs between its UNSHARD and RESHARD, and its gradients are complete at REDUCE_GRAD;
- all data that crosses ranks is sent and received once, before it is read;
- there is no deadlock;
- no rank holds more than the memory bound.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from stepgauge.spec.plan.pipeline.action import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVES,
    REDUCE,
    RESHARD,
    SENDS,
    UNSHARD,
    WEIGHT,
    Action,
    Schedule,
    ScheduleError,
)
from stepgauge.spec.plan.pipeline.depend import dependencies, find_cycle
from stepgauge.spec.plan.pipeline.lower import lower, receives, with_sends


@dataclasses.dataclass(frozen=True)
class Held:
    """Memory that one micro-batch of one stage holds, in any unit.

    activations  held from F until I or B
    for_weights  what W needs, held from I until W: a part of the activations, or also what I recomputes
    temporary    what an action of a kind holds only while it runs; none if the kind is missing
    """

    activations: float = 1.0
    for_weights: float = 1.0
    temporary: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Checked:
    """The lowered schedule with the memory of each rank.

    peak         the most memory held at once, in the unit of `held` (by default micro-batches)
    peak_action  the action during which the peak is reached
    in_flight    the most micro-batches at once between F and I or B
    saved        the most micro-batches at once between I and W
    """

    schedule: Schedule
    peak: tuple[float, ...]
    peak_action: tuple[Action, ...]
    in_flight: tuple[int, ...]
    saved: tuple[int, ...]


def check(
    schedule: Schedule,
    *,
    ranks: int | None = None,
    held: Mapping[int, Held] | None = None,
    bound: float | None = None,
) -> Checked:
    """Returns the lowered schedule with its memory, or raises ScheduleError if it cannot run.

    ranks  the number of ranks that it must have; None: any
    held   memory of each stage; by default every stage holds 1 from F until B or W
    bound  the most memory that a rank may hold
    """
    if bound is not None and not math.isfinite(bound):
        raise ValueError(f"bound is {bound}; it must be a finite number")
    if ranks is not None and schedule.num_ranks != ranks:
        raise ScheduleError(f"schedule is for {schedule.num_ranks} ranks; there are {ranks}")
    _check_each_once(schedule)
    _check_rank_order(schedule)
    lowered = lower(schedule)
    _check_stage_work(lowered)
    _check_transfers(lowered)
    if stuck := find_cycle(dependencies(lowered)):
        path = " waits for ".join(map(str, (*stuck, stuck[0])))
        raise ScheduleError(f"the schedule deadlocks: {path}", stuck)
    checked = _with_memory(lowered, held or {})
    for rank, peak in enumerate(checked.peak):
        if bound is not None and peak > bound:
            action = checked.peak_action[rank]
            raise ScheduleError(
                f"rank {rank} holds {peak:g} at {action}; the bound is {bound:g}", (action,)
            )
    return checked


def _check_each_once(schedule: Schedule) -> None:
    """Checks that every stage has, for every micro-batch, one F and either one B or one I and W."""
    times = collections.Counter(action for _, action in schedule)
    for action, number in times.items():
        if number > 1:
            raise ScheduleError(f"{action} is in the schedule {number} times", (action,))
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            forward, whole, grad_input, weight = (
                Action(stage, kind, micro_batch) for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)
            )
            if forward not in times:
                raise ScheduleError(f"{forward} is missing", (forward,))
            parts = [part for part in (grad_input, weight) if part in times]
            if whole in times and parts:
                raise ScheduleError(
                    f"{whole} is a whole backward, so {parts[0]} must not be there", (whole, *parts)
                )
            if whole not in times and not parts:
                raise ScheduleError(f"{forward} has no backward {whole}", (forward, whole))
            if len(parts) == 1:
                (missing,) = {grad_input, weight} - set(parts)
                raise ScheduleError(
                    f"{parts[0]} is in the schedule but {missing} is missing", (missing,)
                )


def _check_rank_order(schedule: Schedule) -> None:
    """Checks that F comes before B and I, and I before W. Dependencies on other stages are checked
    by the deadlock check.
    """
    for rank, row in enumerate(schedule.ranks):
        place = {action: number for number, action in enumerate(row)}
        for action in row:
            stage, kind, micro_batch = action
            earlier = {BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}.get(kind)
            first = Action(stage, earlier, micro_batch) if earlier else action
            if place[first] > place[action]:
                raise ScheduleError(f"rank {rank} runs {action} before {first}", (action, first))


def _check_stage_work(schedule: Schedule) -> None:
    """Checks that UNSHARD comes before a stage's first action, REDUCE_GRAD after its last gradient,
    and RESHARD after both.
    """
    for rank, row in enumerate(schedule.ranks):
        place = {action: number for number, action in enumerate(row)}
        for stage in schedule.stages(rank):
            own = [action for action in row if action.stage == stage and action.is_compute]
            gradients = [action for action in own if action.kind in (BACKWARD, WEIGHT)]
            unshard, reduce, reshard = (Action(stage, kind) for kind in (UNSHARD, REDUCE, RESHARD))
            order = (
                (unshard, own[0]),
                (gradients[-1], reduce),
                (own[-1], reshard),
                (reduce, reshard),
            )
            for first, later in order:
                if {first, later} <= place.keys() and place[first] > place[later]:
                    raise ScheduleError(f"rank {rank} runs {later} before {first}", (later, first))


def _check_transfers(schedule: Schedule) -> None:
    """Checks that each result that another rank reads is sent after it is computed and received
    before it is read, and that nothing else is sent or received.
    """
    plain = schedule.compute
    for rank, row in enumerate(schedule.ranks):
        place = {action: number for number, action in enumerate(row)}
        needed = receives(plain, plain.ranks[rank])
        sends: dict[Action, Action] = {}
        for action in plain.ranks[rank]:
            sends |= dict.fromkeys(with_sends(plain, [action])[1:], action)
        for send, source in sends.items():
            if send not in place:
                raise ScheduleError(f"rank {rank} does not send: {send} is missing", (send,))
            if place[send] < place[source]:
                raise ScheduleError(f"rank {rank} runs {send} before {source}", (send, source))
        for reader, receive in needed.items():
            if receive not in place:
                raise ScheduleError(f"{reader} needs {receive}, which is missing", (receive,))
            if place[receive] > place[reader]:
                raise ScheduleError(
                    f"rank {rank} runs {reader} before {receive}", (reader, receive)
                )
        expected = {*sends, *needed.values()}
        for action in row:
            if action.kind in (*SENDS, *RECEIVES) and action not in expected:
                raise ScheduleError(f"no rank needs {action} of rank {rank}", (action,))


def _with_memory(schedule: Schedule, held: Mapping[int, Held]) -> Checked:
    peaks, actions = [], []
    for row in schedule.ranks:
        levels = live(row, held)
        peaks.append(max(levels))
        actions.append(row[levels.index(peaks[-1])])
    return Checked(
        schedule=schedule,
        peak=tuple(peaks),
        peak_action=tuple(actions),
        in_flight=tuple(_most_open(row, (FORWARD,), (BACKWARD, INPUT)) for row in schedule.ranks),
        saved=tuple(_most_open(row, (INPUT,), (WEIGHT,)) for row in schedule.ranks),
    )


def live(row: Sequence[Action], held: Mapping[int, Held]) -> list[float]:
    """Returns the memory that a rank holds during each of its actions."""
    levels, now = [], 0.0
    for action, (taken, freed) in zip(row, changes(row, held), strict=True):
        now += taken
        levels.append(now + held.get(action.stage, Held()).temporary.get(action.kind, 0.0))
        now -= freed
    return levels


def changes(row: Iterable[Action], held: Mapping[int, Held]) -> Iterator[tuple[float, float]]:
    """Yields for each action the memory allocated at its start and the memory freed at its end, without
    temporary memory.
    """
    for action in row:
        of_stage = held.get(action.stage, Held())
        freed = {
            BACKWARD: of_stage.activations,
            INPUT: of_stage.activations - of_stage.for_weights,
            WEIGHT: of_stage.for_weights,
        }
        taken = of_stage.activations if action.kind == FORWARD else 0.0
        yield taken, freed.get(action.kind, 0.0)


def _most_open(row: Sequence[Action], opening: Sequence[str], closing: Sequence[str]) -> int:
    """Returns the most micro-batches at once between an opening and a closing action."""
    now = most = 0
    for action in row:
        now += (action.kind in opening) - (action.kind in closing)
        most = max(most, now)
    return most
