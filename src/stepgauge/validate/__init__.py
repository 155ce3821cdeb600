"""Predictions beside measurements: the only place that sees a modelled and a measured record of the
same spec.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from stepgauge.report.names import labels
from stepgauge.report.table import Table
from stepgauge.spec.record import Record

STEP = "step_ms"
COLUMNS = ("row", "predicted ms", "measured ms", "error")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prediction and the measurement of the same thing asked."""

    modelled: Record
    measured: Record

    def error(self, metric: str) -> float | None:
        """Predicted over measured, less one; None where one of them has no such figure."""
        predicted, found = self.modelled.median(metric), self.measured.median(metric)
        return predicted / found - 1 if predicted is not None and found else None


def pairs(records: Iterable[Record]) -> list[Pair]:
    """Every measured record with the last prediction of it, in the order of the measurements."""
    records = list(records)
    modelled = {record.key: record for record in records if record.provenance == "modelled"}
    return [
        Pair(modelled[record.key], record)
        for record in records
        if record.provenance == "measured" and record.status == "ok" and record.key in modelled
    ]


def error_table(found: Sequence[Pair]) -> Table:
    """A row a pair: the step predicted and measured, and the signed errors of its phases."""
    phases = [
        name
        for name in ("forward_ms", "backward_ms", "optimizer_ms")
        if any(pair.error(name) is not None for pair in found)
    ]
    columns = [*COLUMNS, *(f"{name.removesuffix('_ms')} error" for name in phases)]
    names = labels([pair.measured for pair in found])
    rows = [
        [
            name,
            pair.modelled.median(STEP),
            pair.measured.median(STEP),
            *(pair.error(metric) for metric in (STEP, *phases)),
        ]
        for name, pair in zip(names, found, strict=True)
    ]
    formats = {column: "+.1%" for column in columns if column.endswith("error")}
    return Table(columns, rows, names=1, formats=formats, caption=sentence(found))


def sentence(found: Sequence[Pair]) -> str:
    """What the errors come to."""
    errors = [error for pair in found if (error := pair.error(STEP)) is not None]
    if not errors:
        return "No row was both predicted and measured."
    sizes = [abs(error) for error in errors]
    return (
        f"Error of the predicted step over {len(errors)} rows: mean {statistics.fmean(sizes):.1%}, "
        f"at most {max(sizes):.1%}; signed mean {statistics.fmean(errors):+.1%}."
    )
