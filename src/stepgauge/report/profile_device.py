"""Tables of how the device was used: idle time, collectives, critical path."""

from stepgauge.report.kernel_names import range_name
from stepgauge.report.table import Table
from stepgauge.spec.analysis import Analysis
from stepgauge.trace.collectives import bus_bytes_per_s

SHOWN = 16


def idle_table(found: Analysis) -> Table:
    """Times in which the device stood still, and why."""
    rows = [
        [row.reason, row.phase or "rest", row.gaps / found.steps, row.us / 1e3 / found.steps, row.us / row.gaps]
        for row in sorted(found.idle, key=lambda row: -row.us)
    ]  # fmt: skip
    head = ["why the device stood still", "phase", "gaps a step", "ms a step", "mean µs"]
    return Table(head, rows, caption="Idle time of the device, by cause.", names=2)


def path_table(found: Analysis) -> Table:
    """The critical path by kind of work, with what each would gain."""
    rows = [
        [row.what, row.us / 1e3 / found.steps, 100 * row.us / found.steps / (found.step_us or 1.0),
         row.gain_us / 1e3 / found.steps]
        for row in found.path
    ]  # fmt: skip
    head = ["on the critical path", "ms a step", "% of the step", "ms gained if it took no time"]
    caption = (
        "Critical path through host and device, by a model that plays launches, waits and streams "
        f"again (its step differs from the trace's by {100 * found.path_error:+.2f} %)."
    )
    return Table(head, rows, caption=caption, names=1)


def collectives_table(found: Analysis) -> Table:
    """This rank's collectives; the time in each includes waiting for other ranks."""
    rows = []
    for row in found.collectives[:SHOWN]:
        calls = len(row.calls_us)
        busbw = bus_bytes_per_s(row, row.us / calls) / 1e9
        rows.append([row.name, range_name(row.range), row.dtype, row.group_size or None, row.bytes or None,
                     calls / found.steps, row.us / 1e3 / found.steps, row.us / calls, busbw or None])  # fmt: skip
    head = [
        "collective",
        "range",
        "type",
        "ranks",
        "size B",
        "calls a step",
        "ms a step",
        "mean µs",
        "busbw GB/s",
    ]
    caption = "Collectives of this rank; their times include waiting for the others, so busbw is the least."
    return Table(head, rows, caption=caption, names=5)
