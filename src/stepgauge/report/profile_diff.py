"""Two analyses beside each other: what grew, by phase, kind, range and kernel."""

from collections import defaultdict
from collections.abc import Callable, Mapping

from stepgauge.report.kernel_names import shortened
from stepgauge.report.numbers import number
from stepgauge.report.table import Table
from stepgauge.spec.analysis import Analysis, Cell

SHOWN = 16
LONGEST_NAME = 72


def difference_tables(before: Analysis, after: Analysis) -> list[Table]:
    """One table a question, the largest changes first, in ms a step."""
    phases = [{p or "rest": sum(v) / 1e3 / one.steps for p, v in one.phases_us.items()}
              for one in (before, after)]  # fmt: skip
    for one, sums in zip((before, after), phases, strict=True):
        sums["step"] = one.step_us / 1e3
    idle = [_idle(one) for one in (before, after)]
    tables = [
        _table("phase", phases[0], phases[1], "Phases of A and B, on the device's time line."),
        _of_cells(before, after, "kind", lambda cell: cell.kind, "Kinds of work"),
        _of_cells(before, after, "range", lambda cell: cell.range or "outside of all", "Ranges"),
        _of_cells(
            before, after, "kernel", lambda cell: shortened(cell.name, LONGEST_NAME), "Kernels"
        ),
        _table("why the device stood still", idle[0], idle[1], "Idle time of A and B."),
    ]
    return [table for table in tables if table.rows]


def sentence(before: Analysis, after: Analysis) -> str:
    """By how much the step changed, and in what most."""
    grown = (after.step_us - before.step_us) / 1e3
    kinds = [_sums(one, lambda cell: cell.kind) for one in (before, after)]
    changes = {k: kinds[1].get(k, 0.0) - kinds[0].get(k, 0.0) for k in {*kinds[0], *kinds[1]}}
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


def _sums(one: Analysis, key: Callable[[Cell], str]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for cell in one.cells:
        sums[key(cell)] += cell.us / 1e3 / one.steps
    return sums


def _of_cells(
    before: Analysis, after: Analysis, what: str, key: Callable[[Cell], str], title: str
) -> Table:
    calls = []
    for one in (before, after):
        counted: dict[str, float] = defaultdict(float)
        for cell in one.cells:
            counted[key(cell)] += cell.calls / one.steps
        calls.append(counted)
    caption = f"{title}: ms a step in A and B, those that changed most."
    return _table(what, _sums(before, key), _sums(after, key), caption, calls)


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
