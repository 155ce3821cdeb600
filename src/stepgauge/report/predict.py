"""A modelled record's terms as a table."""

from stepgauge.report.table import Table
from stepgauge.spec.record import Record


def terms_table(record: Record) -> Table:
    """Every term of the prediction: what runs how often, the milliseconds, where they come from."""
    head, *rows = record.tables["terms"]
    place = head.index("us")
    shown = [[*row[:place], row[place] / 1e3, *row[place + 1 :]] for row in rows]
    columns = [*head[:place], "ms", *head[place + 1 :]]
    caption = f"Terms of {record.median('step_ms'):.2f} ms on {record.environment['hardware']}"
    return Table(columns, shown, names=4, caption=caption, numeric=frozenset(("count", "ms")))
