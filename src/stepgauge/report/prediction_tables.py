"""Tables, a plot and a report section on the errors of predictions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from stepgauge.report.figure import Curve, lines, short
from stepgauge.report.names import layout_labels
from stepgauge.report.page import Block, Plot, Section
from stepgauge.report.prediction_errors import (
    DISTURBED_FILE,
    TERMS,
    Errors,
    errors,
    groups,
    ranks_of,
    sentence,
)
from stepgauge.report.table import REMARK, SEPARATOR, Table
from stepgauge.report.views import figure, remark_with_prediction
from stepgauge.spec.predictions import STEP, Row, pair_steps
from stepgauge.spec.record import Record

QUESTION = "How far are the predicted steps from the measured ones?"
PEAK = "predicted peak GiB"  # a column if a step did not end: memory is why most of them do not
METHOD = (
    "Each row was predicted from a hardware file of this device before it was run, and no prediction "
    "is scaled to fit. The error of a term is its predicted minus its measured time, divided by the "
    "measured step, so the terms of a row add up to the error of its step. The term communication "
    "is the time that communication adds to the step. The term host is the phases that are predicted "
    "to be bound by the host. Rows are named by their layouts, and a batch is that of all ranks. A "
    "group consists of rows with the same work on the same number of ranks."
)


def error_table(records: Sequence[Record], *, unpredicted: bool = False) -> Table:
    """Returns one row per predicted and measured step, with the signed errors of its terms. A step
    that ran out of memory or failed has its prediction and status. With `unpredicted`, steps that
    were only measured are included.
    """
    every = errors(records)
    found = {id(each.row.record): each for each in every}
    steps = [
        row
        for row in pair_steps(records)
        if row.record.provenance == "measured"
        and (id(row.record) in found or row.prediction is not None or unpredicted)
        and (row.record.status != "ok" or STEP in row.record.metrics)
    ]
    terms = [term for term in TERMS if any(abs(each.terms.get(term, 0)) > 5e-4 for each in every)]
    names = layout_labels([row.record for row in steps])
    rows = [
        [name, *_cells(row, found.get(id(row.record)), terms)]
        for name, row in zip(names, steps, strict=True)
    ]
    always = ["row", "predicted ms", "measured ms", "error", *terms]
    columns = ["row", "predicted ms", PEAK, *always[2:], "peak error", REMARK]
    filled = {column for n, column in enumerate(columns) if any(row[n] for row in rows)}
    if all(row.record.status == "ok" for row in steps):
        filled.discard(PEAK)  # the error of the peak says more
    table = Table(
        columns,
        rows,
        names=1,
        formats=dict.fromkeys(("error", *terms), "+.1%") | {"peak error": "+.2%"},
        caption=sentence(records),
        absent="-",
        notes=[f"The error is the sum of its parts: {', '.join(terms)}."] if terms[1:] else (),
    )
    return table.select([n for n, name in enumerate(columns) if name in (*always, *filled)])


def _cells(row: Row, found: Errors | None, terms: Sequence[str]) -> list[Any]:
    """Returns the figures and the remark of a step; `found` are its errors if it has any."""
    metrics = row.prediction.metrics if row.prediction else {}
    predicted = [figure(metrics.get(name)) for name in (STEP, "peak_bytes")]
    of_terms = [found.terms.get(term) if found else None for term in terms]
    error, peak = (found.step, found.peak) if found else (None, None)
    remark = _own_remark(row)
    if row.prediction is None:
        remark = SEPARATOR.join(filter(None, ["not predicted", remark]))
    return [*predicted, row.record.median(STEP), error, *of_terms, peak, remark]


def _own_remark(row: Row) -> str:
    """Returns the row's remark without the warning on the hardware file, which is in the caption."""
    parts = remark_with_prediction(row).split(SEPARATOR)
    return SEPARATOR.join(part for part in parts if DISTURBED_FILE not in part)


def _times(each: Errors) -> list[float | None]:
    """Returns the predicted and the measured time."""
    assert each.row.prediction is not None
    return [record.median(STEP) for record in (each.row.prediction, each.row.record)]


def group_table(records: Sequence[Record]) -> Table:
    """Returns the fastest row of each group, its predicted rank, and what relying on the prediction
    would cost.
    """
    every = errors(records)
    labels = layout_labels([each.row.record for each in every])
    names = dict(zip(map(id, every), labels, strict=True))
    rows = [
        [names[id(group.rows[0])], len(group.rows), group.rank, group.loses]
        for group in groups(every)
    ]
    return Table(
        [
            "fastest of its group",
            "rows",
            "place in the prediction",
            "predicted best takes longer by",
        ],
        rows,
        names=1,
        formats={"predicted best takes longer by": "+.1%"},
        caption="Was the fastest predicted? A group has the same work and ranks." if rows else "",
    )


def plot(records: Sequence[Record]) -> Plot:
    """Plots predicted against measured steps, one series per number of ranks."""
    every = errors(records)
    curves: dict[str, Curve] = {}
    for ranks in sorted({ranks_of(each.row.record) for each in every}):
        own = [_times(each) for each in every if ranks_of(each.row.record) == ranks]
        measured, predicted = ([pair[place] or 0.0 for pair in own] for place in (1, 0))
        curves["1 rank" if ranks == 1 else f"{ranks} ranks"] = (measured, predicted)
    times = [ms for xs, ys in curves.values() for ms in (*xs, *ys)]
    ends = [0.9 * min(times), 1.1 * max(times)]
    svg = lines(
        {"predicted = measured": (ends, ends), **curves},
        x="measured ms per step",
        y="predicted ms per step",
        dots=list(curves),
        joined=False,
        scales={"x": short, "y": short},
    )
    return Plot(svg, "Predicted against measured step time. On the line they are equal.")


def blocks(records: Sequence[Record]) -> list[Block]:
    """Returns the plot and the tables, or nothing if no step was both predicted and measured."""
    if not errors(records):
        return []
    ranked = group_table(records)
    # The caption is the section's answer, and METHOD has more than the note.
    table = dataclasses.replace(error_table(records), caption="", notes=())
    return [plot(records), table, *([ranked] if ranked.rows else [])]


def section(records: Sequence[Record]) -> Section:
    return Section("Predicted and measured", QUESTION, blocks(records), sentence(records), METHOD)
