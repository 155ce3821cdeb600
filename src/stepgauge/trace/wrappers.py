"""Finds operations that only call another one: linear calls addmm, to calls copy_."""

from collections.abc import Iterable

from stepgauge.trace import flops
from stepgauge.trace.events import Call
from stepgauge.trace.kinds import Kinds


def wrappers(calls: Iterable[Call], kinds: Kinds) -> set[int]:
    """Returns the ids of calls whose self time is overhead, because an operation inside moves at least
    half of their bytes, or an unknown number. `calls` must have outer before inner.
    """
    stack: list[Call] = []
    ids: set[int] = set()
    for call in calls:
        if call.category != "op":
            continue
        while stack and stack[-1].end <= call.start:
            stack.pop()
        if stack and id(stack[-1]) not in ids and _works_for(call, stack[-1], kinds):
            ids.add(id(stack[-1]))
        stack.append(call)
    return ids


def _works_for(inner: Call, outer: Call, kinds: Kinds) -> bool:
    if flops.stands_for_all_inside(outer.name):
        return False
    if kinds.of_operation(inner.name, inner.category, False).kind == "host":
        return False
    inner_bytes, outer_bytes = (flops.cost(call.name, call.shapes).bytes for call in (inner, outer))
    return inner_bytes is None or inner_bytes >= (outer_bytes or 0.0) / 2
