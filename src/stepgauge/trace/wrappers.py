"""Operations of the host that call another one to do their work: linear calls addmm, to calls copy_."""

from collections.abc import Iterable

from stepgauge.trace import flops
from stepgauge.trace.events import Call
from stepgauge.trace.kinds import Kinds


def wrappers(calls: Iterable[Call], kinds: Kinds) -> set[int]:
    """The ids of the calls, given outer before inner, whose time of their own is that of calling:
    another operation within moves half of their bytes or more, or what is not known.
    """
    around: list[Call] = []
    found: set[int] = set()
    for call in calls:
        if call.category != "op":
            continue
        while around and around[-1].end <= call.start:
            around.pop()
        if around and id(around[-1]) not in found and _works_for(call, around[-1], kinds):
            found.add(id(around[-1]))
        around.append(call)
    return found


def _works_for(inner: Call, outer: Call, kinds: Kinds) -> bool:
    if flops.stands_for_all_inside(outer.name):
        return False
    if kinds.of_operation(inner.name, inner.category, False).kind == "host":
        return False
    moved, asked = (flops.cost(call.name, call.shapes).bytes for call in (inner, outer))
    return moved is None or moved >= (asked or 0.0) / 2
