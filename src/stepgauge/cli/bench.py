"""`stepgauge bench ...`: one command a thing that can be timed, every option a list to sweep."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from stepgauge.cli.console import Format, print_records, progress, summary, tell
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.report.views import describe
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore

if TYPE_CHECKING:
    from stepgauge.bench.sweep import Job
    from stepgauge.spec.record import Record

app = App(name="bench", help="Times one thing over every combination of the options given.")

Out = Annotated[Path, Parameter(help="Folder of the run.")]
Fresh = Annotated[bool, Parameter(help="Measure again what the run already holds.", negative="")]


class RunFailedError(Exception):
    """Something that was run failed; the message is one sentence."""


@app.command
@spec_options(StepSpec, ModelSpec, sweep=True, defaults={"size": "small", "device": "auto"})
def step(
    *,
    values: Values,
    out: Out = Path("runs/bench-step"),
    fresh: Fresh = False,
    format: Annotated[Format, Parameter(help="How the rows are printed at the end.")] = "table",
) -> None:
    """Time a training step: forward, backward, optimizer and whole.

    Every option takes several values, and their product is measured. Each row is on disk the moment it is measured;
    the same command again goes on where it stopped. A size that does not fit gives a row that says OOM.
    """
    from stepgauge.bench import step as bench_step
    from stepgauge.bench.sweep import Job

    specs = resolve_devices(expand(StepSpec, values))
    for spec in specs:
        bench_step.check(spec)
    records = run_jobs([Job(bench_step.run, spec) for spec in specs], RunStore(out), fresh=fresh)
    print_records(records, format)
    require_success(records)


def resolve_devices(specs: Any) -> list[Any]:
    """The specs with each device checked and named as what it is. Raises ValueError for one that is not there."""
    from stepgauge.measure.devices import resolve

    return [dataclasses.replace(spec, device=str(resolve(spec.device))) for spec in specs]


def run_jobs(jobs: Sequence["Job"], store: RunStore, *, fresh: bool) -> list["Record"]:
    """Sweeps with a progress bar and a line a row; returns all records, those of earlier runs too."""
    from stepgauge.bench.sweep import sweep

    records, reused = [], 0
    with store.held(), progress(len(jobs), "rows") as (bar, task):
        for outcome in sweep(
            jobs, store, fresh=fresh, starting=lambda job: bar.update(task, description=describe(job.asked))
        ):
            records.append(outcome.record)
            reused += outcome.was_there
            bar.advance(task)
            if not outcome.was_there:
                tell(summary(outcome.record))
    if reused:
        tell(f"{reused} of {len(records)} rows were already in {store.folder}; --fresh measures them again")
    return records


def require_success(records: Sequence["Record"]) -> None:
    failed = [record for record in records if record.status == "failed"]
    if failed:
        raise RunFailedError(f"{len(failed)} of {len(records)} rows failed: {failed[0].note}")
