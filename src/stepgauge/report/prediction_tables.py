"""Errors of predictions as tables, a plot and a section of a report."""

import dataclasses
from collections.abc import Sequence

from stepgauge.report.figure import Curve, lines, short
from stepgauge.report.names import labels
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
from stepgauge.report.views import remark, remark_with_prediction
from stepgauge.spec.predictions import STEP, steps_beside
from stepgauge.spec.record import Record

QUESTION = "How far is what was predicted from what was measured?"
METHOD = (
    "Each row was predicted from a hardware file of this device before it was run, and nothing is "
    "scaled to fit. A term's error is its predicted less its measured time, over the measured "
    "step: the terms of a row add up to its error. Communication is what it adds to the step; "
    "what the prediction holds for bound by the host is the host's. Groups do the same step on as "
    "many ranks."
)


def error_table(records: Sequence[Record], *, unpredicted: bool = False) -> Table:
    """A row for each step that was predicted and measured, with the signed errors of its terms; with
    `unpredicted` also for each that was measured alone.
    """
    found = errors(records)
    alone = _measured_alone(records) if unpredicted else []
    terms = [term for term in TERMS if any(abs(each.terms.get(term, 0)) > 5e-4 for each in found)]
    rows = [
        [*_times(each), each.step, *map(each.terms.get, terms), each.peak, _own_remark(each)]
        for each in found
    ]
    for record in alone:
        said = SEPARATOR.join(filter(None, ["not predicted", remark(record)]))
        rows.append([None, record.median(STEP), *[None] * (len(terms) + 2), said])
    names = labels([*(each.row.record for each in found), *alone])
    columns = ["row", "predicted ms", "measured ms", "error", *terms, "peak error", REMARK]
    every = [[name, *row] for name, row in zip(names, rows, strict=True)]
    kept = [n for n in range(len(columns)) if n < 4 + len(terms) or any(row[n] for row in every)]
    return Table(
        [columns[n] for n in kept],
        [[row[n] for n in kept] for row in every],
        names=1,
        formats=dict.fromkeys(("error", *terms), "+.1%") | {"peak error": "+.2%"},
        caption=sentence(records),
        absent="-",
    )


def _measured_alone(records: Sequence[Record]) -> list[Record]:
    """Steps that were measured and not predicted."""
    rows = [row for row in steps_beside(records) if row.prediction is None]
    measured = [row.record for row in rows if row.record.provenance == "measured"]
    return [record for record in measured if record.status == "ok" and STEP in record.metrics]


def _own_remark(each: Errors) -> str:
    """Without what is to be known of the hardware file, which the caption has for all rows."""
    parts = remark_with_prediction(each.row).split(SEPARATOR)
    return SEPARATOR.join(part for part in parts if DISTURBED_FILE not in part)


def _names(found: Sequence[Errors]) -> list[str]:
    return labels([each.row.record for each in found])


def _times(each: Errors) -> list[float | None]:
    assert each.row.prediction is not None
    return [record.median(STEP) for record in (each.row.prediction, each.row.record)]


def group_table(records: Sequence[Record]) -> Table:
    """Of each group the fastest, its rank among the predictions, and what the choice would cost."""
    found = errors(records)
    names = dict(zip(map(id, found), _names(found), strict=True))
    rows = [
        [names[id(group.rows[0])], len(group.rows), group.rank, group.loses]
        for group in groups(found)
    ]
    return Table(
        ["fastest of its group", "rows", "predicted rank", "predicted best slower by"],
        rows,
        names=1,
        formats={"predicted best slower by": "+.1%"},
        caption="Rows that do the same step on as many ranks." if rows else "",
    )


def plot(records: Sequence[Record]) -> Plot:
    """Predicted against measured steps, by the number of ranks."""
    found = errors(records)
    curves: dict[str, Curve] = {}
    for ranks in sorted({ranks_of(each.row.record) for each in found}):
        own = [_times(each) for each in found if ranks_of(each.row.record) == ranks]
        measured, predicted = ([pair[place] or 0.0 for pair in own] for place in (1, 0))
        curves["1 rank" if ranks == 1 else f"{ranks} ranks"] = (measured, predicted)
    times = [ms for xs, ys in curves.values() for ms in (*xs, *ys)]
    ends = [0.9 * min(times), 1.1 * max(times)]
    svg = lines(
        {"predicted = measured": (ends, ends), **curves},
        x="measured ms a step",
        y="predicted ms a step",
        dots=list(curves),
        joined=False,
        scales={"x": short, "y": short},
    )
    return Plot(svg, "Predicted against measured steps; on the line they are equal.")


def blocks(records: Sequence[Record]) -> list[Block]:
    """The plot and the tables; nothing where no step has both."""
    if not errors(records):
        return []
    ranked = group_table(records)
    table = dataclasses.replace(error_table(records), caption="")  # the section begins with it
    return [plot(records), table, *([ranked] if ranked.rows else [])]


def section(records: Sequence[Record]) -> Section:
    return Section("Predicted and measured", QUESTION, blocks(records), sentence(records), METHOD)
