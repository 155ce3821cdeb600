"""`stepgauge bench pipeline`: times pipeline-parallel forward and backward."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli import rows
from stepgauge.cli.console import print_records, write_file
from stepgauge.cli.options import Networks, Values, expand, spec_options
from stepgauge.report.pipeline_steps import steps_of, tracks
from stepgauge.report.standalone import standalone
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.record import Record


@spec_options(PipelineSpec, Networks, sweep=True, defaults={"size": "small", "device": "auto"})
def pipeline(
    *,
    values: Values,
    out: rows.Out = Path("runs/bench-pipeline"),
    fresh: rows.Fresh = False,
    format: rows.RowFormat = "table",
    pictures: Annotated[
        bool,
        Parameter(help="Write an SVG per row: the predicted timeline above the measured one."),
    ] = False,
) -> None:
    """Time pipeline-parallel forward and backward passes, and simulate each schedule.

    Every option accepts several values; all combinations are measured. Before a row runs, its stages
    are timed one by one and its schedule is simulated with these times; the prediction becomes a row
    of the run, too.
    """
    specs = rows.resolve_devices(
        rows.canonical_specs(expand(PipelineSpec, values, network=Networks))
    )
    records = rows.measure(specs, out, fresh=fresh)
    rows.require_single_success(records, format)
    print_records(records, format)
    if pictures:
        _write_pictures(records, out)
    rows.require_success(records)


def _write_pictures(records: list[Record], folder: Path) -> None:
    measured = [record for record in records if record.provenance == "measured"]
    timelines = [steps for record in measured if (steps := steps_of(record, records))]
    for number, steps in enumerate(timelines):
        write_file(standalone(tracks(steps)), folder / f"timeline-{number}.svg", "picture")
