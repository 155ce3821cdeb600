"""`stepgauge bench pipeline`: times pipeline-parallel forward and backward."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli import rows
from stepgauge.cli.console import write_file
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.report.names import labels
from stepgauge.report.pipeline_steps import steps_of, wide_tracks
from stepgauge.report.standalone import standalone
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.record import Record


@spec_options(
    PipelineSpec, ModelSpec, BertSpec, sweep=True, defaults={"size": "small", "device": "auto"}
)
def pipeline(
    *,
    values: Values,
    out: rows.Out = Path("runs/bench-pipeline"),
    fresh: rows.Fresh = False,
    format: rows.RowFormat = "table",
    pictures: Annotated[
        bool,
        Parameter(
            help="Write an SVG per row: the predicted timeline above that of the last measured step. A "
            "torch-* row has only the predicted one, because torch records no times of actions."
        ),
    ] = False,
) -> None:
    """Time pipeline-parallel forward and backward passes, and simulate each schedule.

    Every option accepts several values; all combinations are measured. Before a row runs, each
    rank rehearses it without the others, and its schedule is simulated with these times; the prediction
    becomes a row of the run, too.

    A step's time is that of the slowest rank, busy ms the mean over ranks of the time in which a rank
    computes. peak GiB is the most that tensors hold on a GPU; on CPUs resident peak GiB is the most
    memory that a process had so far, also before the step.
    """
    specs = rows.resolve_devices(rows.canonical_specs(expand(PipelineSpec, values)))
    records = rows.measure(specs, out, fresh=fresh)
    rows.print_rows(records, format)
    if pictures:
        write_pictures(records, out)
    rows.require_success(records)


def write_pictures(records: Sequence[Record], folder: Path) -> None:
    """Draws each measured row and prints which row each picture shows. `records` has predictions, too."""
    measured = [record for record in records if record.provenance == "measured"]
    for record, label in zip(measured, labels(measured), strict=True):
        if steps := steps_of(record, records):
            path = folder / picture_name(record)
            write_file(standalone(wide_tracks(steps)), path, f"picture of {label}")


def picture_name(record: Record) -> str:
    """Returns a name that no other row in the folder has. Measuring the row again keeps it."""
    spec = record.spec
    row = hashlib.sha256("\n".join(record.identity).encode()).hexdigest()[:8]
    return f"timeline-{spec['schedule']}-m{spec['micro_batches']}-ranks{spec['ranks']}-{row}.svg"
