"""The dependency graph of a lowered schedule. The checker looks for cycles in it, and the simulator
walks it.

A transfer is one node, named by its SEND. It starts when both ranks have posted their side. An
action depends on

- the computation before it on its rank, and its stage's UNSHARD;
- the data that it reads: the forward of the stage before, the backward of the stage after, or the
  transfer that brings one of these;
- for a transfer: the transfers posted before it on the same channel, in the sender's order and in
  the receiver's order. If the two orders differ, the graph has a cycle.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

from stepgauge.spec.plan.pipeline.action import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVES,
    SEND_B,
    SEND_F,
    SENDS,
    UNSHARD,
    WEIGHT,
    Action,
    Schedule,
)

Dependencies = dict[Action, list[Action]]


def node(action: Action) -> Action:
    """The graph node of an action: a SEND and its RECV share the node of the SEND."""
    return action.as_send if action.kind in RECEIVES else action


def dependencies(schedule: Schedule) -> Dependencies:
    """Returns the actions that each action waits for, with every RECV replaced by its SEND."""
    waits: Dependencies = {node(action): [] for _, action in schedule}
    for row in schedule.ranks:
        for action, earlier in _rank_order(row):
            waits[node(action)].append(earlier)
        for earlier, later in _channel_order(row):
            waits[later].append(earlier)
    for _, action in schedule:
        if action.is_compute or action.kind in SENDS:
            waits[action] += [source for source in _sources(schedule, action) if source in waits]
    return waits


def _rank_order(row: Sequence[Action]) -> Iterable[tuple[Action, Action]]:
    """Yields each action of a rank with the computation before it, and the first computation of a
    stage with the stage's UNSHARD.
    """
    previous: Action | None = None
    unshards: dict[int, Action] = {}
    for action in row:
        if previous is not None:
            yield action, previous
        if action.is_compute:
            previous = action
            if action.stage in unshards:
                yield action, unshards.pop(action.stage)
        if action.kind == UNSHARD:
            unshards[action.stage] = action


def _channel_order(row: Sequence[Action]) -> Iterable[tuple[Action, Action]]:
    """Yields pairs of transfers that this rank posts one after the other on the same channel."""
    posted = collections.defaultdict(list)
    for action in row:
        if action.kind in (*SENDS, *RECEIVES):
            posted[action.channel].append(node(action))
    for transfers in posted.values():
        yield from itertools.pairwise(transfers)


def _sources(schedule: Schedule, action: Action) -> list[Action]:
    """Returns the actions whose results this action reads. A backward may be B or I: both are
    listed, and the caller drops the one that is not in the schedule.
    """
    stage, kind, micro_batch = action
    if kind == SEND_B:
        return [Action(stage, BACKWARD, micro_batch), Action(stage, INPUT, micro_batch)]
    if kind == WEIGHT:
        return [Action(stage, INPUT, micro_batch)]
    if kind == FORWARD:
        source = SEND_F if schedule.crosses(stage, stage - 1) else FORWARD
        return [Action(stage - 1, source, micro_batch)]
    forward = Action(stage, FORWARD, micro_batch)
    if kind == SEND_F:
        return [forward]
    sources = (SEND_B,) if schedule.crosses(stage, stage + 1) else (BACKWARD, INPUT)
    return [forward, *(Action(stage + 1, source, micro_batch) for source in sources)]


def topological_order(waits: Mapping[Action, Sequence[Action]]) -> list[Action]:
    """Returns the actions, each after those that it waits for. Actions that are on a cycle or wait
    for one are left out.
    """
    missing = {action: len(earlier) for action, earlier in waits.items()}
    readers: dict[Action, list[Action]] = collections.defaultdict(list)
    for action, earlier in waits.items():
        for other in earlier:
            readers[other].append(action)
    ready = collections.deque(action for action, number in missing.items() if not number)
    ordered = []
    while ready:
        action = ready.popleft()
        ordered.append(action)
        for reader in readers[action]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return ordered


def find_cycle(waits: Mapping[Action, Sequence[Action]]) -> list[Action]:
    """Returns actions of which each waits for the next and the last for the first; empty if there
    is no cycle.
    """
    stuck = set(waits) - set(topological_order(waits))
    if not stuck:
        return []
    path = [min(stuck)]
    while True:
        following = next(other for other in waits[path[-1]] if other in stuck)
        if following in path:
            return path[path.index(following) :]
        path.append(following)
