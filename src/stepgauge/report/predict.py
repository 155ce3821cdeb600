"""A modelled record's terms, and the parts of its memory, as tables."""

from stepgauge.cost.rates.estimate import spread
from stepgauge.report.table import Table
from stepgauge.spec.record import Record
from stepgauge.spec.units import GIB


def terms_table(record: Record, label: str) -> Table:
    """Every term of the prediction: what runs how often, the milliseconds, where they come from.

    label  names the row
    """
    head, *rows = record.tables["terms"]
    columns = ["phase", "term", "ms", "operation", "source", "count", "sizes"]
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    shown = [[{**cell, "ms": cell["us"] / 1e3}[name] for name in columns] for cell in cells]
    caption = (
        f"{label}: terms of {record.median('step_ms'):.2f} ms ± {spread(record):.0%} by their "
        f"sources, on {record.environment['hardware']}"
    )
    return Table(columns, shown, names=2, caption=caption, numeric=frozenset(("count", "ms")))


def memory_table(record: Record, label: str) -> Table:
    """The parts of the peak, and what lies outside of torch's count, in GiB."""
    head, *rows = record.tables["memory"]
    shown = [[name, nbytes / GIB, source] for name, nbytes, source in rows]
    peak = (record.median("peak_bytes") or 0.0) / GIB
    columns = [head[0], "GiB", head[2]]
    return Table(columns, shown, names=1, caption=f"{label}: parts of the peak of {peak:.2f} GiB",
                 numeric=frozenset(("GiB",)))  # fmt: skip
