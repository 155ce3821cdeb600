"""`stepgauge bench pipeline`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli import rows
from stepgauge.cli.console import print_records, write
from stepgauge.cli.options import Networks, Values, expand, spec_options
from stepgauge.report.pipeline_steps import steps_of, tracks
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
        bool, Parameter(help="An SVG a row in the folder: predicted above measured.")
    ] = False,
) -> None:
    """Time pipeline parallel forward and backward, each row beside its own simulation.

    Every option takes several values, and their product is measured. Before a row runs, its stages
    are timed alone and its schedule is simulated: that prediction is a row of the run too.
    """
    specs = rows.with_devices(rows.distinct(expand(PipelineSpec, values, network=Networks)))
    records = rows.measured(specs, out, fresh=fresh)
    print_records(records, format)
    if pictures:
        _draw(records, out)
    rows.require_success(records)


def _draw(records: list[Record], folder: Path) -> None:
    measured = [record for record in records if record.provenance == "measured"]
    drawn = [found for record in measured if (found := steps_of(record, records))]
    for number, steps in enumerate(drawn):
        write(tracks(steps), folder / f"timeline-{number}.svg", "picture")
