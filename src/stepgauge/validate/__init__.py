"""Predictions beside measurements: the only place that sees a modelled and a measured record of the
same spec.
"""

import statistics
from collections.abc import Sequence

from stepgauge.report.names import labels
from stepgauge.report.table import Table
from stepgauge.spec.predictions import STEP, steps_beside
from stepgauge.spec.record import Record

COLUMNS = ("row", "predicted ms", "measured ms", "error")


def error_table(records: Sequence[Record]) -> Table:
    """A row for each step that was predicted and measured, with the signed errors of its phases."""
    found = [
        (row, row.prediction)
        for row in steps_beside(records)
        if row.prediction and row.record.status == "ok"
    ]
    phases = [
        name
        for name in ("forward_ms", "backward_ms", "optimizer_ms")
        if any(row.error(name) is not None for row, _ in found)
    ]
    columns = [*COLUMNS, *(f"{name.removesuffix('_ms')} error" for name in phases)]
    names = labels([row.record for row, _ in found])
    rows = [
        [
            name,
            prediction.median(STEP),
            row.record.median(STEP),
            *(row.error(metric) for metric in (STEP, *phases)),
        ]
        for name, (row, prediction) in zip(names, found, strict=True)
    ]
    formats = {column: "+.1%" for column in columns if column.endswith("error")}
    return Table(columns, rows, names=1, formats=formats, caption=sentence(records))


def sentence(records: Sequence[Record]) -> str:
    """What the errors of the predicted steps come to."""
    errors = [e for row in steps_beside(records) if (e := row.error(STEP)) is not None]
    if not errors:
        return "No row was both predicted and measured."
    sizes = [abs(error) for error in errors]
    return (
        f"Error of the predicted step over {len(errors)} rows: mean {statistics.fmean(sizes):.1%}, "
        f"at most {max(sizes):.1%}; signed mean {statistics.fmean(errors):+.1%}."
    )
