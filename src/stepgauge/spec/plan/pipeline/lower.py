"""Lowering: adds sends, receives and work on weights and gradients to a schedule of computations.

Where receives are posted is an explicit choice, `ahead`: how many computations before the one that
needs the data. With 0 a receive is posted when its data is needed. With 1 the transfer can overlap
the previous computation, at the price of one more buffer.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from stepgauge.spec.plan.pipeline.action import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECV_B,
    RECV_F,
    REDUCE,
    RESHARD,
    SEND_B,
    SEND_F,
    SENDS,
    UNSHARD,
    WEIGHT,
    Action,
    Channel,
    Schedule,
)

AHEAD = 1


def lower(schedule: Schedule, *, ahead: int = AHEAD, sharded: Collection[int] = ()) -> Schedule:
    """Returns the schedule with everything that a runtime does. Existing sends and receives stay
    where they are. Each stage's gradients are reduced after its last W or B.

    ahead    computations between a receive and the one that needs its data
    sharded  stages whose weights are unsharded before their first action and resharded after their
             last

    Raises ValueError for a negative `ahead`.
    """
    if ahead < 0:
        raise ValueError(f"ahead is {ahead}; it must be at least 0")
    rows = [_with_stage_work(row, sharded) for row in schedule.ranks]
    if not schedule.is_lowered:
        rows = [with_sends(schedule, row) for row in rows]
        order = _receive_order(rows)
        rows = [_with_receives(row, receives(schedule, row), order, ahead) for row in rows]
    return dataclasses.replace(schedule, ranks=tuple(map(tuple, rows)))


def with_sends(schedule: Schedule, row: Sequence[Action]) -> list[Action]:
    """Returns the row with a send after each result that another rank reads."""
    lowered = []
    for action in row:
        lowered.append(action)
        stage, kind, micro_batch = action
        if kind == FORWARD and schedule.crosses(stage, stage + 1):
            lowered.append(Action(stage, SEND_F, micro_batch))
        if kind in (BACKWARD, INPUT) and schedule.crosses(stage, stage - 1):
            lowered.append(Action(stage, SEND_B, micro_batch))
    return lowered


def receives(schedule: Schedule, row: Sequence[Action]) -> dict[Action, Action]:
    """Returns the receive that each action needs, for the actions that read from another rank."""
    needed = {}
    for action in row:
        stage, kind, micro_batch = action
        if kind == FORWARD and schedule.crosses(stage, stage - 1):
            needed[action] = Action(stage, RECV_F, micro_batch)
        if kind in (BACKWARD, INPUT) and schedule.crosses(stage, stage + 1):
            needed[action] = Action(stage, RECV_B, micro_batch)
    return needed


def _receive_order(rows: Sequence[Sequence[Action]]) -> dict[Channel, list[Action]]:
    """Returns the receives of each channel, in the order in which the sender sends."""
    order: dict[Channel, list[Action]] = {}
    for row in rows:
        for action in row:
            if action.kind in SENDS:
                order.setdefault(action.channel, []).append(action.as_receive)
    return order


def _with_receives(
    row: Sequence[Action],
    needed: Mapping[Action, Action],
    order: Mapping[Channel, list[Action]],
    ahead: int,
) -> list[Action]:
    """Returns the row with each receive `ahead` computations before its reader. Where the order on
    a channel requires it, a receive is posted earlier.
    """
    compute_places = [place for place, action in enumerate(row) if action.is_compute]
    place_of: dict[Action, int] = {}  # receive -> index of the action that it is posted before
    for number, place in enumerate(compute_places):
        if row[place] in needed:
            place_of[needed[row[place]]] = compute_places[max(0, number - ahead)]
    channel_position: dict[Action, int] = {}
    for channel in {receive.channel for receive in needed.values()}:
        sent = order.get(channel, [])
        channel_position |= {receive: number for number, receive in enumerate(sent)}
        earliest = len(row)
        for receive in reversed(sent):
            earliest = min(earliest, place_of.get(receive, earliest))
            place_of[receive] = earliest
    posted: list[list[Action]] = [[] for _ in range(len(row) + 1)]
    for receive in sorted(place_of, key=lambda receive: channel_position.get(receive, -1)):
        posted[place_of[receive]].append(receive)
    lowered: list[Action] = []
    for before, action in zip(posted, row, strict=False):
        lowered += [*before, action]
    return lowered


def _with_stage_work(row: Sequence[Action], sharded: Collection[int]) -> list[Action]:
    """Returns the row with REDUCE_GRAD after each stage's last W or B, and for sharded stages with
    UNSHARD before the first action and RESHARD after the last. Actions that the row already has
    stay where they are.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    last_gradient: dict[int, int] = {}
    for place, action in enumerate(row):
        if action.is_compute:
            first.setdefault(action.stage, place)
        if action.is_compute or action.kind == REDUCE:
            last[action.stage] = place
        if action.kind in (BACKWARD, WEIGHT):
            last_gradient[action.stage] = place
    present, lowered = set(row), []
    for place, action in enumerate(row):
        stage = action.stage
        unshard, reduce, reshard = (Action(stage, kind) for kind in (UNSHARD, REDUCE, RESHARD))
        if stage in sharded and first[stage] == place and unshard not in present:
            lowered.append(unshard)
        lowered.append(action)
        if last_gradient.get(stage) == place and reduce not in present:
            lowered.append(reduce)
        if stage in sharded and last[stage] == place and reshard not in present:
            lowered.append(reshard)
    return lowered
