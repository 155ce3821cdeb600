"""Tables of our kernels compared with their peers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from stepgauge.report.names import flatten, identifying_fields
from stepgauge.report.numbers import scaled
from stepgauge.report.table import REMARK, Table
from stepgauge.report.views import record_table, remark
from stepgauge.spec.kernel import KERNELS, OURS
from stepgauge.spec.record import Record

RATES = {"gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s"}
WITHOUT_COLUMN = ("peers", "seconds", "seed")  # how a row is measured: not shown


def implementations(records: Sequence[Record]) -> list[str]:
    """Returns the implementations that ran or were tried in any record, ours first."""
    names = [name for record in records for name in record.environment.get("outcomes", {})]
    return sorted(dict.fromkeys(names), key=lambda name: (name != OURS, names.index(name)))


def timed_implementations(records: Sequence[Record]) -> list[str]:
    """Returns the implementations that have a time in any record, ours first."""
    names = implementations(records)
    return [name for name in names if any(f"{name}_ms" in each.metrics for each in records)]


def kernel_table(records: Sequence[Record], *, statistics: Sequence[str] = ()) -> Table:
    """Returns one row per record: the median time of each implementation, and ours relative to the
    best peer and to the ceiling. With `statistics`, returns the general `record_table`.
    """
    shape = KERNELS[records[0].kind].shape if records[0].kind in KERNELS else ()
    if statistics:
        return record_table(records, statistics=statistics, first=(*shape, "dtype"))
    differs = [
        name
        for name in identifying_fields(records)
        if name not in (*WITHOUT_COLUMN, *shape, "passes", "dtype")
    ]
    fields = [*shape, *differs, "dtype", "passes"]
    figures = _figures(records)
    remarks = [remark(record) for record in records]
    rows = []
    for record, text in zip(records, remarks, strict=True):
        spec = flatten(record.spec)
        cells = [spec.get(name) for name in fields]
        cells += [value(record) for value in figures.values()]
        rows.append(cells + ([text] if any(remarks) else []))
    return Table(
        [*fields, *figures, *([REMARK] if any(remarks) else [])],
        rows,
        numeric=frozenset(figures),
        caption=(
            "Medians. 'over best peer' is the best peer's time divided by ours: above 1, our kernel "
            "is faster. 'of ceiling' is the fraction of the device's measured ceiling."
        ),
        formats=dict.fromkeys(("over best peer", "of ceiling"), ".3f"),
    )


def _figures(records: Sequence[Record]) -> dict[str, Callable[[Record], Any]]:
    """Returns the columns of figures: each heading with a function that gives a record's cell."""
    measured = {metric for record in records for metric in record.metrics}
    peers = timed_implementations(records)
    figures: dict[str, Callable[[Record], Any]] = {}
    if OURS in peers:
        peers.remove(OURS)
        figures[f"{OURS} ms"] = functools.partial(_time, name=OURS)
    figures["over best peer"] = lambda record: record.median("ratio_to_best_peer")
    figures["of ceiling"] = lambda record: record.median("fraction_of_ceiling")
    for name in peers:
        figures[f"{name} ms"] = functools.partial(_time, name=name)
    for rate, unit in RATES.items():
        metric = f"{OURS}_{rate}"
        if metric in measured:
            figures[f"{OURS} {unit}"] = functools.partial(Record.median, metric=metric)
    figures["extra GiB"] = lambda record: scaled(record.median(f"{OURS}_extra_bytes"), "bytes")
    return figures


def _time(record: Record, name: str) -> float | str | None:
    """Returns the median time, or the word for why there is none."""
    if f"{name}_ms" in record.metrics:
        return record.median(f"{name}_ms")
    return str(record.environment.get("outcomes", {}).get(name, "")).partition(":")[0]


def outcomes_of(records: Sequence[Record]) -> list[str]:
    """Returns a text with the reason for each implementation that did not run."""
    return [
        f"without {name}: {reason.removeprefix('absent: ')}"
        for name, reason in dict.fromkeys(
            (name, outcome)
            for record in records
            for name, outcome in record.environment.get("outcomes", {}).items()
            if outcome.startswith("absent: ")
        )
    ]
