"""What every action of a lowered schedule waits for: the graph that the checker looks for cycles in
and the simulator walks.

A transfer is one node, named by its SEND: it begins when both sides are there. An action waits for

- the computation before it on its rank, and the work on its stage's weights that stands before it;
- the data that it reads: an earlier stage's forward, a later stage's backward, or the transfer;
- a transfer also for the ones before it on its communicator, in the sender's order and in the
  receiver's: where these differ there is a cycle.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

from stepgauge.spec.plan.pipeline.action import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVES,
    SENDS,
    UNSHARD,
    WEIGHT,
    Action,
    Schedule,
)

Waits = dict[Action, list[Action]]


def node(action: Action) -> Action:
    """Both sides of a transfer are its SEND."""
    return action.sent if action.kind in RECEIVES else action


def dependencies(schedule: Schedule) -> Waits:
    """Each action with those that it waits for; RECVs stand for their SENDs."""
    waits: Waits = {node(action): [] for _, action in schedule}
    for row in schedule.ranks:
        for action, before in _placed_after(row):
            waits[node(action)].append(before)
        for before, after in _order_of_transfers(row):
            waits[after].append(before)
    for _, action in schedule:
        if action.is_compute or action.kind in SENDS:
            waits[action] += [other for other in _read(schedule, action) if other in waits]
    return waits


def _placed_after(row: Sequence[Action]) -> Iterable[tuple[Action, Action]]:
    """Each action of a rank with the computation before it, and with what weights it waits for."""
    before: Action | None = None
    whole: dict[int, Action] = {}
    for action in row:
        if before is not None:
            yield action, before
        if action.is_compute:
            before = action
            if action.stage in whole:
                yield action, whole.pop(action.stage)
        if action.kind == UNSHARD:
            whole[action.stage] = action


def _order_of_transfers(row: Sequence[Action]) -> Iterable[tuple[Action, Action]]:
    """Transfers that follow each other on a communicator, as this rank posts them: each direction of
    each edge has one.
    """
    posted = collections.defaultdict(list)
    for action in row:
        if action.kind in (*SENDS, *RECEIVES):
            posted[action.channel].append(node(action))
    for transfers in posted.values():
        yield from itertools.pairwise(transfers)


def _read(schedule: Schedule, action: Action) -> list[Action]:
    """What the action reads; of the backwards of a stage that may be either, both."""
    stage, kind, micro_batch = action
    own_backward = [Action(stage, BACKWARD, micro_batch), Action(stage, INPUT, micro_batch)]
    if kind in SENDS:
        return [Action(stage, FORWARD, micro_batch)] if kind == "SEND_F" else own_backward
    if kind == WEIGHT:
        return [Action(stage, INPUT, micro_batch)]
    if kind == FORWARD:
        if schedule.crosses(stage, stage - 1):
            return [Action(stage - 1, "SEND_F", micro_batch)]
        return [Action(stage - 1, FORWARD, micro_batch)]
    forward = Action(stage, FORWARD, micro_batch)
    if schedule.crosses(stage, stage + 1):
        return [forward, Action(stage + 1, "SEND_B", micro_batch)]
    after = [Action(stage + 1, name, micro_batch) for name in (BACKWARD, INPUT)]
    return [forward, *after]


def in_order(waits: Mapping[Action, Sequence[Action]]) -> list[Action]:
    """The actions so that each comes after those that it waits for; those of cycles are left out."""
    left = {action: len(others) for action, others in waits.items()}
    readers: dict[Action, list[Action]] = collections.defaultdict(list)
    for action, others in waits.items():
        for other in others:
            readers[other].append(action)
    ready = collections.deque(action for action, number in left.items() if not number)
    ordered = []
    while ready:
        action = ready.popleft()
        ordered.append(action)
        for reader in readers[action]:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    return ordered


def cycle(waits: Mapping[Action, Sequence[Action]]) -> list[Action]:
    """Actions each of which waits for the next, and the last for the first; none where all can run."""
    stuck = set(waits) - set(in_order(waits))
    if not stuck:
        return []
    path = [min(stuck)]
    while True:
        following = next(other for other in waits[path[-1]] if other in stuck)
        if following in path:
            return path[path.index(following) :]
        path.append(following)
