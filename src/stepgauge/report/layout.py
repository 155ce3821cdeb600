"""Steps under layouts: what each axis costs beside computing, and which layout is the quickest."""

from collections.abc import Mapping, Sequence

from stepgauge.report.figure import MOST_BARS, stacked_bars
from stepgauge.report.names import flatten, labels
from stepgauge.report.numbers import number
from stepgauge.report.page import Block, Plot, Text
from stepgauge.report.views import plotted, record_table, undisturbed
from stepgauge.spec.layout import Layout
from stepgauge.spec.record import Record
from stepgauge.spec.user_model import UserModel

AXES: Mapping[str, str] = {
    "data": "data: gradients and weights",
    "context": "context: keys around the ring",
    "tensor": "tensor: the residual stream",
    "pipeline": "pipeline: transfers and bubbles",
}
MEANING = (
    "Exposed time of data and tensor is the step less the same step without that axis' "
    "communication; of a pipeline, forward and backward less what its busiest rank computes. A "
    "difference below zero is not shown."
)


def layout_blocks(records: Sequence[Record]) -> Sequence[Block]:
    """Bars of computing and of each axis, and the table."""
    shown = [r for r in records if r.status == "ok" and r.provenance == "measured"][:MOST_BARS]
    if not shown:
        return [record_table(records)]
    parts = {"computing and optimizer": [_rest(record) for record in shown]}
    for axis, name in AXES.items():
        values = [_exposed(record, axis) for record in shown]
        if any(values):
            parts[name] = values
    totals = [plotted(record, "step_ms") for record in shown]
    svg = stacked_bars(labels(shown), parts, totals=totals, unit="ms a step (medians)")
    return [Plot(svg, "Step time by axis."), Text(MEANING), record_table(records)]


def _exposed(record: Record, axis: str) -> float | None:
    exposed = record.median(f"{axis}_exposed_ms")
    return None if exposed is None else max(0.0, exposed)


def _rest(record: Record) -> float | None:
    step = record.median("step_ms")
    if step is None:
        return None
    return max(0.0, step - sum(_exposed(record, axis) or 0.0 for axis in AXES))


def layout_answer(records: Sequence[Record]) -> str:
    """Of the rows that do the same step as most others, the quickest on several ranks."""
    timed = [r for r in records if r.median("step_ms") and r.provenance == "measured"]
    good, among = undisturbed(timed)
    if not good:
        return "All rows were disturbed: no layout can be called the quickest."
    work = _work(good[-1])
    same = [record for record in good if _work(record) == work]
    best = min(same, key=lambda record: record.median("step_ms") or 0.0)
    alone = next((r for r in same if r.spec["layout"] == "none"), None)
    step = best.median("step_ms") or 0.0
    beside = ""
    if alone is not None and alone is not best:
        beside = f", {(alone.median('step_ms') or 0.0) / step:.2f} × as fast as one process"
    return (
        f"{f'{among}at' if among else 'At'} size={best.spec['size']} layout {best.spec['layout']!r} is the quickest: "
        f"{number(step)} ms a step{beside}{_why(best, same)}."
    )


def _why(best: Record, same: Sequence[Record]) -> str:
    """What the quickest and the others on several ranks spend beside computing; nothing where that
    was not measured.
    """
    costs: dict[str, float] = {}
    for record in same:
        exposed = [_exposed(record, axis) for axis in AXES]
        measured = [ms for ms in exposed if ms is not None]
        if measured:
            costs[str(record.spec["layout"])] = sum(measured)
    own = costs.pop(str(best.spec["layout"]), None)
    if not costs:
        return ""
    others = " and ".join(f"{number(ms)} ms under {name!r}" for name, ms in costs.items())
    if best.spec["layout"] == "none":
        return f", since it sends nothing; sending and waiting take {others}"
    if own is None:
        return f"; sending and waiting beside computing take {others}"
    return f"; sending and waiting beside computing take {number(own)} ms of it, {others}"


def _work(record: Record) -> dict[str, object]:
    """What decides how much a step computes."""
    spec = flatten(record.spec)
    names = ("size", "batch", "accumulation", "context_length", "precision", "optimizer")
    work = {name: spec.get(name) for name in names}
    if spec.get("network") == UserModel.network:  # each data rank has a batch of its own
        work["batches"] = Layout.parse(str(spec["layout"])).data
    return work
