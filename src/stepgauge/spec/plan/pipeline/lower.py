"""Lowering: a schedule of computations gets its sends, receives and work on sharded weights.

Where a receive is posted is a pass of its own, so that it is a decision and not luck: so many
computations before the one that needs it. 0 posts it when it is needed; 1 lets the transfer run
during the computation before, for one more buffer.
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
    UNSHARD,
    WEIGHT,
    Action,
    Channel,
    Schedule,
)

AHEAD = 1


def lower(schedule: Schedule, *, ahead: int = AHEAD, sharded: Collection[int] = ()) -> Schedule:
    """The schedule with all that a runtime does; where it has sends and receives they stay.

    ahead    computations between a receive and the one that needs it
    sharded  stages whose weights are gathered before their first action and dropped after their
             last

    Each stage's gradients are reduced after its last W or B. Raises ValueError for a
    negative `ahead`.
    """
    if ahead < 0:
        raise ValueError(f"ahead is {ahead}; it must be at least 0")
    rows = [with_stage_work(row, sharded) for row in schedule.ranks]
    if not schedule.is_lowered:
        rows = [with_sends(schedule, row) for row in rows]
        order = sent_order(rows)
        rows = [place_receives(row, receives(schedule, row), order, ahead) for row in rows]
    return dataclasses.replace(schedule, ranks=tuple(map(tuple, rows)))


def with_sends(schedule: Schedule, row: Sequence[Action]) -> list[Action]:
    """Every result is sent as soon as it is there, if its reader is on another rank."""
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
    """What the actions of a rank need from others: the receive of each that needs one."""
    found = {}
    for action in row:
        stage, kind, micro_batch = action
        if kind == FORWARD and schedule.crosses(stage, stage - 1):
            found[action] = Action(stage, RECV_F, micro_batch)
        if kind in (BACKWARD, INPUT) and schedule.crosses(stage, stage + 1):
            found[action] = Action(stage, RECV_B, micro_batch)
    return found


def sent_order(rows: Sequence[Sequence[Action]]) -> dict[Channel, list[Action]]:
    """The receives of each channel in the order in which their sender sends."""
    order: dict[Channel, list[Action]] = {}
    for row in rows:
        for action in row:
            if action.kind in (SEND_F, SEND_B):
                order.setdefault(action.channel, []).append(action.received)
    return order


def place_receives(
    row: Sequence[Action],
    needed: Mapping[Action, Action],
    order: Mapping[Channel, list[Action]],
    ahead: int,
) -> list[Action]:
    """The row with receives `ahead` computations before their readers, and in order on each channel."""
    places = [place for place, action in enumerate(row) if action.is_compute]
    wanted: dict[Action, int] = {}  # the place before which each receive is posted
    for number, place in enumerate(places):
        reader = row[place]
        if reader in needed:
            wanted[needed[reader]] = places[max(0, number - ahead)]
    for channel in {receive.channel for receive in needed.values()}:
        earliest = len(row)
        for receive in reversed(order.get(channel, [])):
            earliest = min(earliest, wanted.get(receive, earliest))
            wanted[receive] = earliest
    numbers: dict[Action, int] = {}
    for sent in order.values():
        numbers |= {receive: number for number, receive in enumerate(sent)}
    posted: list[list[Action]] = [[] for _ in range(len(row) + 1)]
    for receive in sorted(wanted, key=lambda receive: numbers.get(receive, -1)):
        posted[wanted[receive]].append(receive)
    placed: list[Action] = []
    for receives, own in zip(posted, row, strict=False):
        placed += [*receives, own]
    return placed


def with_stage_work(row: Sequence[Action], sharded: Collection[int]) -> list[Action]:
    """Gradients of a stage are reduced after its last W or B; a sharded stage is whole from its
    first action to its last. What of this is there stays where it is.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    graded: dict[int, int] = {}
    for place, action in enumerate(row):
        if action.is_compute:
            first.setdefault(action.stage, place)
        if action.is_compute or action.kind == REDUCE:
            last[action.stage] = place
        if action.kind in (BACKWARD, WEIGHT):
            graded[action.stage] = place
    there, lowered = set(row), []
    for place, action in enumerate(row):
        stage = action.stage
        unshard, reduce, reshard = (Action(stage, kind) for kind in (UNSHARD, REDUCE, RESHARD))
        if stage in sharded and first[stage] == place and unshard not in there:
            lowered.append(unshard)
        lowered.append(action)
        if graded.get(stage) == place and reduce not in there:
            lowered.append(reduce)
        if stage in sharded and last[stage] == place and reshard not in there:
            lowered.append(reshard)
    return lowered
