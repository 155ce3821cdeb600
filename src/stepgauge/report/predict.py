"""Tables of a prediction: the terms of its time and the parts of its memory."""

from stepgauge.cost.rates.estimate import spread
from stepgauge.report.table import Table
from stepgauge.spec.record import Record
from stepgauge.spec.units import GIB


def terms_table(record: Record, label: str) -> Table:
    """Returns every term of the predicted step: the operation, its count and sizes, its time, and the
    source of the time. `label` names the prediction.
    """
    head, *rows = record.tables["terms"]
    columns = ["phase", "term", "ms", "source", "operation", "count", "sizes"]
    terms = [dict(zip(head, row, strict=True)) for row in rows]
    shown = [[{**term, "ms": term["us"] / 1e3}[name] for name in columns] for term in terms]
    caption = (
        f"{label}: terms of the predicted step, {record.median('step_ms'):.2f} ms "
        f"± {spread(record):.0%}, on {record.environment['hardware']}"
    )
    return Table(columns, shown, names=2, caption=caption, numeric=frozenset(("count", "ms")))


def memory_table(record: Record, label: str) -> Table:
    """Returns the parts of the peak in GiB, including memory that torch does not count."""
    head, *rows = record.tables["memory"]
    shown = [[name, nbytes / GIB, source] for name, nbytes, source in rows]
    peak = (record.median("peak_bytes") or 0.0) / GIB
    columns = [head[0], "GiB", head[2]]
    return Table(columns, shown, names=1, caption=f"{label}: parts of the peak of {peak:.2f} GiB",
                 numeric=frozenset(("GiB",)))  # fmt: skip
