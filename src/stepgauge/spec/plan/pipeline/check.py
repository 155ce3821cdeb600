"""Whether a schedule can run, and what it holds in memory while it does.

A schedule that fails is refused with the actions that prove it. What is checked, in this order:
each stage runs each micro-batch forward and backward once; in an order of a rank that makes sense;
its weights are whole while it runs, and its gradients there when they are reduced; everything that
is read is sent and received once, before it is read; no action waits for itself through others
(deadlock); the memory bound holds.
"""

import collections
import dataclasses
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
from stepgauge.spec.plan.pipeline.depend import cycle, dependencies
from stepgauge.spec.plan.pipeline.lower import lower, receives, with_sends


@dataclasses.dataclass(frozen=True)
class Held:
    """What one micro-batch of one stage holds, in any unit: activations from F until I or B, and
    the part of them that W needs until W.
    """

    activations: float = 1.0
    for_weights: float = 1.0


@dataclasses.dataclass(frozen=True)
class Checked:
    """What the check of a schedule found, one value a rank.

    peak         most that is held at once, in the unit asked for (micro-batches of a stage)
    peak_action  the action at which it is
    in_flight    most activations at once, whatever they weigh
    saved        most inputs of W at once
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
    """The lowered schedule and its memory. Raises ScheduleError with the actions that prove it.

    ranks  how many it must be for; None: any
    held   of each stage; without it every stage holds 1 from F until B or W
    bound  most that a rank may hold
    """
    if ranks is not None and schedule.num_ranks != ranks:
        raise ScheduleError(f"schedule is for {schedule.num_ranks} ranks; there are {ranks}")
    _each_once(schedule)
    _order_on_ranks(schedule)
    lowered = lower(schedule)
    _work_on_weights(lowered)
    _communication(lowered)
    _no_deadlock(lowered)
    found = _memory(lowered, held or {})
    for rank, peak in enumerate(found.peak):
        if bound is not None and peak > bound:
            action = found.peak_action[rank]
            raise ScheduleError(
                f"rank {rank} holds {peak:g} at {action}; the bound is {bound:g}", (action,)
            )
    return found


def _each_once(schedule: Schedule) -> None:
    """One F, and one B or one I and one W, of every micro-batch in every stage."""
    times = collections.Counter(action for _, action in schedule)
    for action, number in times.items():
        if number > 1:
            raise ScheduleError(f"{action} is there {number} times", (action,))
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
                    f"{whole} is a whole backward; {parts[0]} is one too many", (whole, *parts)
                )
            if whole not in times and not parts:
                raise ScheduleError(f"{forward} has no backward, {whole}", (forward, whole))
            if len(parts) == 1:
                (missing,) = {grad_input, weight} - set(parts)
                raise ScheduleError(f"{parts[0]} is there but {missing} is missing", (missing,))


def _order_on_ranks(schedule: Schedule) -> None:
    """F before B, I and W; I before W. What waits for other stages is the graph's business."""
    for rank, row in enumerate(schedule.ranks):
        place = {action: number for number, action in enumerate(row)}
        for action in row:
            stage, kind, micro_batch = action
            earlier = {BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}.get(kind)
            first = Action(stage, earlier, micro_batch) if earlier else action
            if place[first] > place[action]:
                raise ScheduleError(f"rank {rank} runs {action} before {first}", (action, first))


def _work_on_weights(schedule: Schedule) -> None:
    """UNSHARD before a stage's first action, REDUCE_GRAD after its last gradient, RESHARD after all."""
    for rank, row in enumerate(schedule.ranks):
        place = {action: number for number, action in enumerate(row)}
        for stage in schedule.stages(rank):
            own = [action for action in row if action.stage == stage and action.is_compute]
            graded = [action for action in own if action.kind in (BACKWARD, WEIGHT)]
            unshard, reduce, reshard = (Action(stage, kind) for kind in (UNSHARD, REDUCE, RESHARD))
            order = ((unshard, own[0]), (graded[-1], reduce), (own[-1], reshard), (reduce, reshard))
            for first, later in order:
                if {first, later} <= place.keys() and place[first] > place[later]:
                    raise ScheduleError(f"rank {rank} runs {later} before {first}", (later, first))


def _communication(schedule: Schedule) -> None:
    """Every result that another rank reads is sent after it is there and received before it is
    read; nothing else is.
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
        known = {*sends, *needed.values()}
        for action in row:
            if action.kind in (*SENDS, *RECEIVES) and action not in known:
                raise ScheduleError(f"nobody needs {action} of rank {rank}", (action,))


def _no_deadlock(schedule: Schedule) -> None:
    if stuck := cycle(dependencies(schedule)):
        path = " waits for ".join(map(str, (*stuck, stuck[0])))
        raise ScheduleError(f"the schedule cannot end: {path}", stuck)


def _memory(schedule: Schedule, held: Mapping[int, Held]) -> Checked:
    """The schedule, with the most that each rank holds and the action at which it does."""
    peaks, actions = [], []
    for row in schedule.ranks:
        levels = live(row, held)
        peaks.append(max(levels))
        actions.append(row[levels.index(peaks[-1])])
    return Checked(
        schedule=schedule,
        peak=tuple(peaks),
        peak_action=tuple(actions),
        in_flight=tuple(_most(row, (FORWARD,), (BACKWARD, INPUT)) for row in schedule.ranks),
        saved=tuple(_most(row, (INPUT,), (WEIGHT,)) for row in schedule.ranks),
    )


def live(row: Sequence[Action], held: Mapping[int, Held]) -> list[float]:
    """What a rank holds during each of its actions."""
    levels, now = [], 0.0
    for taken, freed in changes(row, held):
        now += taken
        levels.append(now)
        now -= freed
    return levels


def changes(row: Iterable[Action], held: Mapping[int, Held]) -> Iterator[tuple[float, float]]:
    """Of each action what the rank holds more from its begin on, and less from its end on."""
    for action in row:
        of_stage = held.get(action.stage, Held())
        freed = {
            BACKWARD: of_stage.activations,
            INPUT: of_stage.activations - of_stage.for_weights,
            WEIGHT: of_stage.for_weights,
        }
        taken = of_stage.activations if action.kind == FORWARD else 0.0
        yield taken, freed.get(action.kind, 0.0)


def _most(row: Sequence[Action], opening: Sequence[str], closing: Sequence[str]) -> int:
    """Most micro-batches of stages that are between the two at once."""
    now = most = 0
    for action in row:
        now += (action.kind in opening) - (action.kind in closing)
        most = max(most, now)
    return most
