"""`stepgauge profile memory`: shows what uses the memory of a step, and predicts it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli import rows
from stepgauge.cli.console import print_records, print_tables
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.records import write_page
from stepgauge.report.checkpointing import best_checkpoint_tables
from stepgauge.report.memory import kept_tables, memory_tables, summary_table
from stepgauge.report.names import describe
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.predictions import paired
from stepgauge.spec.record import Record


@spec_options(
    MemorySpec,
    ModelSpec,
    sweep=True,
    without=("phases",),
    defaults={"size": "small", "device": "auto"},
)
def memory(
    *,
    values: Values,
    out: rows.Out = Path("runs/profile-memory"),
    fresh: rows.Fresh = False,
    format: rows.RowFormat = "table",
    details: Annotated[
        bool,
        Parameter(help="Print detailed tables of each row, as for a single row."),
    ] = False,
) -> None:
    """Show what uses memory during a training step, and predict it.

    Every storage is tracked from allocation to release. The same step on fake tensors, which have no
    memory, predicts the peak; the prediction is a separate record, next to the measured one. With
    --predict only the prediction is made, for a device that this machine need not have. Every option
    accepts several values; all combinations are measured. The run folder gets records, report.html
    and, on CUDA, the allocator's snapshots for PyTorch's memory viewer.
    """
    specs = rows.resolve_devices(rows.canonical_specs(expand(MemorySpec, values)))
    records = rows.measure(specs, out, fresh=fresh)
    write_page(out)  # before printing, because a reader such as head may end the program
    if format == "table":
        _print_tables(records, details)
    else:
        print_records(records, format)
    rows.require_success([row.record for row in paired(records)])


def _print_tables(records: Sequence[Record], details: bool) -> None:
    shown = [row.shown for row in paired(records)]
    tables = [summary_table(records)]
    for record in shown if details or len(shown) == 1 else []:
        name = describe(record) if len(shown) > 1 else ""
        tables += memory_tables(record, name=name)
    tables += [*kept_tables(shown, largest=False), *best_checkpoint_tables(records)]
    print_tables(tables, "table")
