"""Reports on steps under layouts: the time that each axis adds, and the fastest layout."""

from collections.abc import Mapping, Sequence

from stepgauge.report.figure import MAX_BARS, stacked_bars
from stepgauge.report.names import flatten, labels, network_name
from stepgauge.report.numbers import number
from stepgauge.report.page import Block, Plot, Text
from stepgauge.report.views import plotted, record_table, undisturbed
from stepgauge.spec.layout import Layout
from stepgauge.spec.options import SHAPE
from stepgauge.spec.record import Record
from stepgauge.spec.user_model import UserModel

AXES: Mapping[str, str] = {
    "data": "data: gradients and weights",
    "context": "context: keys around the ring",
    "tensor": "tensor: the residual stream",
    "pipeline": "pipeline: transfers and bubbles",
}
MEANING = (
    "The exposed time of the data or tensor axis is the step's time minus the time of the same step "
    "without that axis's communication. For a pipeline it is forward and backward minus the compute "
    "time of its busiest rank. A difference below zero is not shown."
)


def layout_blocks(records: Sequence[Record]) -> Sequence[Block]:
    """Returns bars of computing and of each axis, and the table."""
    shown = [r for r in records if r.status == "ok" and r.provenance == "measured"][:MAX_BARS]
    if not shown:
        return [record_table(records)]
    parts = {"computing and optimizer": [_rest(record) for record in shown]}
    for axis, name in AXES.items():
        values = [_exposed(record, axis) for record in shown]
        if any(values):
            parts[name] = values
    totals = [plotted(record, "step_ms") for record in shown]
    svg = stacked_bars(labels(shown), parts, totals=totals, unit="ms per step (medians)")
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
    """Returns the fastest layout among the rows that do the same work as the last one."""
    timed = [r for r in records if r.median("step_ms") and r.provenance == "measured"]
    kept, among, why_none = undisturbed(timed)
    if not kept:
        return f"No layout is named as the fastest: {why_none}."
    work = _work(kept[-1])
    same = [record for record in kept if _work(record) == work]
    best = min(same, key=lambda record: record.median("step_ms") or 0.0)
    single = next((r for r in same if r.spec["layout"] == "none"), None)
    step = best.median("step_ms") or 0.0
    speedup = ""
    if single is not None and single is not best:
        speedup = f", {(single.median('step_ms') or 0.0) / step:.2f} × as fast as one process"
    network = network_name(best, timed)
    text = (
        f"{among}{f'at {network}, ' if network else ''}layout {best.spec['layout']!r} is the "
        f"fastest: {number(step)} ms per step{speedup}.{_exposed_times(best, same)}"
    )
    return text[0].upper() + text[1:]


def _exposed_times(best: Record, same: Sequence[Record]) -> str:
    """Returns a sentence on the exposed communication and waiting of each layout, or "" if it was
    measured only for the best.
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
    others = " and ".join(f"{number(ms)} ms with {name!r}" for name, ms in costs.items())
    if best.spec["layout"] == "none":
        return f" It does not communicate; exposed communication and waiting take {others}."
    if own is None:
        return f" Exposed communication and waiting take {others}."
    return f" Exposed communication and waiting take {number(own)} ms of it, and {others}."


def _work(record: Record) -> dict[str, object]:
    """Returns the values that decide how much a step computes."""
    spec = flatten(record.spec)
    names = ("size", "batch", "accumulation", "context_length", "precision", "optimizer", *SHAPE)
    work = {name: spec.get(name) for name in names}
    if spec.get("network") == UserModel.network:  # each data rank draws its own batch
        work["batches"] = Layout.parse(str(spec["layout"])).data
    return work
