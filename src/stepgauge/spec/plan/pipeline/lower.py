"""Lowering: a schedule of computations gets its sends, receives and work on sharded weights.

Where a receive is posted is a pass of its own, so that it is a decision and not luck: so many
computations before the one that needs it. 0 posts it when it is needed; 1 lets the transfer run
during the computation before, for one more buffer. Where transfers are messages, each side keeps
multiprocessors of a GPU busy until the other is there: AS_SENT then posts a receive before the
first computation that begins when the result has been sent, if F, I and W take alike.
"""

import bisect
import collections
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
from stepgauge.spec.plan.pipeline.depend import dependencies, in_order

AHEAD, AS_SENT = 1, -1
UNITS = {FORWARD: 1, INPUT: 1, WEIGHT: 1, BACKWARD: 2}


def lower(schedule: Schedule, *, ahead: int = AHEAD, sharded: Collection[int] = ()) -> Schedule:
    """The schedule with all that a runtime does; one that is lowered already is left as it is.

    ahead    computations between a receive and the one that needs it, or AS_SENT
    sharded  stages whose weights are gathered before their first action and dropped after their
             last

    Each stage's gradients are reduced after its last W or B. Raises ValueError for an `ahead` below
    AS_SENT.
    """
    if ahead < AS_SENT:
        raise ValueError(f"ahead is {ahead}; it must be at least {AS_SENT}")
    if schedule.is_lowered:
        return schedule
    rows = [with_stage_work(row, sharded) for row in schedule.ranks]
    rows = [with_sends(schedule, row) for row in rows]
    order = sent_order(rows)
    needed = [receives(schedule, row) for row in rows]
    earliest = [
        place_receives(row, reads, order, before(row, reads, len(row) if ahead < 0 else ahead))
        for row, reads in zip(rows, needed, strict=True)
    ]
    lowered = dataclasses.replace(schedule, ranks=tuple(map(tuple, earliest)))
    if ahead != AS_SENT:
        return lowered
    begins = unit_times(lowered)
    rows = [
        place_receives(row, reads, order, as_sent(row, reads, begins))
        for row, reads in zip(rows, needed, strict=True)
    ]
    return dataclasses.replace(schedule, ranks=tuple(map(tuple, rows)))


def before(row: Sequence[Action], needed: Mapping[Action, Action], ahead: int) -> dict[Action, int]:
    """Where each receive goes, `ahead` computations before its reader."""
    places = [place for place, action in enumerate(row) if action.is_compute]
    return {
        needed[row[place]]: places[max(0, number - ahead)]
        for number, place in enumerate(places)
        if row[place] in needed
    }


def as_sent(
    row: Sequence[Action], needed: Mapping[Action, Action], begins: Mapping[Action, int]
) -> dict[Action, int]:
    """Where each receive goes: the first computation that begins when it is sent, or its reader."""
    places = [place for place, action in enumerate(row) if action.is_compute]
    starts = [begins[row[place]] for place in places]
    wanted = {}
    for number, place in enumerate(places):
        if row[place] in needed:
            receive = needed[row[place]]
            first = bisect.bisect_left(starts, begins[receive.sent])
            wanted[receive] = places[min(first, number)]
    return wanted


def unit_times(schedule: Schedule) -> dict[Action, int]:
    """When each action of a lowered schedule begins if F, I and W take 1, B 2 and all else nothing;
    none for those of a deadlock.
    """
    waits = dependencies(schedule)
    begins: dict[Action, int] = {}
    for action in in_order(waits):
        begins[action] = max((begins[o] + UNITS.get(o.kind, 0) for o in waits[action]), default=0)
    return collections.defaultdict(int, begins)


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
    wanted: dict[Action, int],
) -> list[Action]:
    """The row with receives where they are wanted, and in order on each channel."""
    for channel in {receive.channel for receive in needed.values()}:
        earliest = len(row)
        for receive in reversed(order.get(channel, [])):
            earliest = min(earliest, wanted.get(receive, earliest))
            wanted[receive] = earliest
    posted: list[list[Action]] = [[] for _ in range(len(row) + 1)]
    numbers = {receive: n for sent in order.values() for n, receive in enumerate(sent)}
    for receive in sorted(wanted, key=lambda r: numbers.get(r, -1)):
        posted[wanted[receive]].append(receive)
    return [action for place, own in enumerate(row) for action in (*posted[place], own)]


def with_stage_work(row: Sequence[Action], sharded: Collection[int]) -> list[Action]:
    """Gradients of a stage are reduced after its last W or B; a sharded stage is whole from its
    first action to its last.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    graded: dict[int, int] = {}
    for place, action in enumerate(row):
        if action.is_compute:
            first.setdefault(action.stage, place)
            last[action.stage] = place
            if action.kind in (BACKWARD, WEIGHT):
                graded[action.stage] = place
    lowered = []
    for place, action in enumerate(row):
        stage = action.stage
        if stage in sharded and first[stage] == place:
            lowered.append(Action(stage, UNSHARD))
        lowered.append(action)
        if graded.get(stage) == place:
            lowered.append(Action(stage, REDUCE))
        if stage in sharded and last[stage] == place:
            lowered.append(Action(stage, RESHARD))
    return lowered
