"""`stepgauge bench pipeline`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stepgauge.cli.console import print_records, tell
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import (
    Fresh,
    Out,
    RowFormat,
    distinct,
    require_success,
    resolve_devices,
    run_jobs,
)
from stepgauge.report.pipeline import timeline_of, tracks
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore


class Networks(ModelSpec):
    """Our Transformers and BERT, by the names of all presets."""

    @staticmethod
    def preset_names() -> tuple[str, ...]:
        return (*ModelSpec.preset_names(), *BertSpec.preset_names())

    @classmethod
    def preset(cls, size: str, **changes: Any) -> Any:
        """Raises ValueError for an unknown name, and for a field that the network does not have."""
        network = BertSpec if size in BertSpec.preset_names() else ModelSpec
        known = {field.name for field in dataclasses.fields(network)}
        for name in changes.keys() - known:
            raise ValueError(f"{name} is {changes[name]!r}; {size} has no such choice")
        return network.preset(size, **changes)


@spec_options(PipelineSpec, Networks, sweep=True, defaults={"size": "small", "device": "auto"})
def pipeline(
    *,
    values: Values,
    out: Out = Path("runs/bench-pipeline"),
    fresh: Fresh = False,
    format: RowFormat = "table",
    pictures: Annotated[
        bool, Parameter(help="An SVG a row in the folder: predicted above measured.", negative="")
    ] = False,
) -> None:
    """Time pipeline parallel forward and backward, each row beside its own simulation.

    Every option takes several values, and their product is measured. Before a row runs, its stages
    are timed alone and its schedule is simulated: that prediction is a row of the run too.
    """
    specs = resolve_devices(distinct(expand(PipelineSpec, values, network=Networks)))

    from stepgauge.bench import pipeline as bench
    from stepgauge.bench.sweep import Job

    for spec in specs:
        bench.checked(spec)
    jobs = [
        job
        for spec in specs
        for job in (Job(bench.PREDICTION, spec, provenance="modelled"), Job(bench.JOB, spec))
    ]
    records = run_jobs(jobs, RunStore(out), fresh=fresh)
    print_records(records, format)
    if pictures:
        _draw(records, out)
    require_success(records)


def _draw(records: list[Record], folder: Path) -> None:
    drawn = 0
    for record in (record for record in records if record.provenance == "measured"):
        same = [other for other in records if other.key == record.key]
        found = {other.provenance: timeline_of(other) for other in same}
        shown = {name: line for name, line in sorted(found.items(), reverse=True) if line}
        named = {"modelled": "predicted", "measured": "measured"}
        if shown:
            path = folder / f"timeline-{drawn}.svg"
            ordered = {named[n]: shown[n] for n in ("modelled", "measured") if n in shown}
            path.write_text(tracks(ordered), encoding="utf-8")
            drawn += 1
            tell(f"picture: {path}")
