"""Two analyses beside each other: what grew, by phase, kind, range and kernel."""

from collections import defaultdict
from collections.abc import Mapping

from stepgauge.report.cells import Sum, short_name, sums_by
from stepgauge.report.numbers import number
from stepgauge.report.table import Table
from stepgauge.spec.analysis import Analysis

SHOWN = 16


def difference_tables(before: Analysis, after: Analysis) -> list[Table]:
    """One table a question, the largest changes first, in ms a step."""
    phases = [{p or "rest": sum(v) / 1e3 / one.steps for p, v in one.phases_us.items()}
              for one in (before, after)]  # fmt: skip
    for one, sums in zip((before, after), phases, strict=True):
        sums["step"] = one.step_us / 1e3
    idle = [_idle(one) for one in (before, after)]
    tables = [
        _table("phase", phases[0], phases[1], "Phases of A and B, on the device's time line."),
        _of_cells(before, after, "kind", "kind", "Kinds of work"),
        _of_cells(before, after, "range", "range", "Ranges"),
        _of_cells(before, after, "kernel", "name", "Kernels"),
        _table("why the device stood still", idle[0], idle[1], "Idle time of A and B."),
    ]
    return [table for table in tables if table.rows]


def sentence(before: Analysis, after: Analysis) -> str:
    """By how much the step changed, and in what most."""
    grown = (after.step_us - before.step_us) / 1e3
    kinds = [sums_by(one, "kind") for one in (before, after)]
    changes = {
        kind: (kinds[1].get((kind,), Sum()).us - kinds[0].get((kind,), Sum()).us) / 1e3
        for (kind,) in {*kinds[0], *kinds[1]}
    }
    idle = sum(_idle(after).values()) - sum(_idle(before).values())
    changes["idle time"] = idle
    most = max(changes, key=lambda kind: changes[kind] * (1 if grown >= 0 else -1))
    return (
        f"A step of B takes {number(after.step_us / 1e3)} ms, of A {number(before.step_us / 1e3)} ms: "
        f"{100 * (after.step_us / before.step_us - 1):+.1f} %, {grown:+,.3f} ms; most in {most} "
        f"({changes[most]:+,.3f} ms)."
    )


def _idle(one: Analysis) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for row in one.idle:
        sums[row.reason] += row.us / 1e3 / one.steps
    return sums


def _of_cells(before: Analysis, after: Analysis, what: str, field: str, title: str) -> Table:
    sums = [
        {
            short_name(value) or "outside of all": each
            for (value,), each in sums_by(one, field).items()
        }
        for one in (before, after)
    ]
    ms = [{name: each.us / 1e3 for name, each in one.items()} for one in sums]
    calls = [{name: each.calls for name, each in one.items()} for one in sums]
    caption = f"{title}: ms a step in A and B, those that changed most."
    return _table(what, ms[0], ms[1], caption, calls)


def _table(
    what: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
    caption: str,
    calls: list[dict[str, float]] | None = None,
) -> Table:
    names = sorted(
        {*before, *after}, key=lambda name: -abs(after.get(name, 0.0) - before.get(name, 0.0))
    )
    rows = []
    for name in names[:SHOWN]:
        a, b = before.get(name, 0.0), after.get(name, 0.0)
        if not a and not b:
            continue
        counts = [counted.get(name, 0.0) for counted in calls] if calls else []
        rows.append([name, a, b, b - a, 100 * (b / a - 1) if a else None, *counts])
    head = [what, "A ms", "B ms", "B − A ms", "B − A %", *(["A calls", "B calls"] if calls else [])]
    formats = {"B − A ms": "+,.3f", "B − A %": "+.1f"}
    return Table(head, rows, numeric=frozenset(head[1:]), caption=caption, names=1, formats=formats)
