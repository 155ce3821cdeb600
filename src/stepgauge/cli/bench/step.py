"""`stepgauge bench step`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import print_records
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.predict import predict_before, print_errors
from stepgauge.cli.rows import (
    Fresh,
    Out,
    RowFormat,
    distinct,
    require_success,
    resolve_devices,
    run_jobs,
)
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore


@spec_options(StepSpec, ModelSpec, sweep=True, defaults={"size": "small", "device": "auto"})
def step(
    *,
    values: Values,
    out: Out = Path("runs/bench-step"),
    fresh: Fresh = False,
    format: RowFormat = "table",
    hardware: Annotated[
        Path | None,
        Parameter(help="Hardware file of this machine: each row is predicted before it is run."),
    ] = None,
) -> None:
    """Time a training step: forward, backward, optimizer and whole.

    The network is a preset, a shape, or your own (--model FILE.py:factory). Every option takes
    several values, and their product is measured. Each row is on disk the moment it is measured;
    the same command again goes on where it stopped. A size that does not fit gives a row that says
    OOM.
    """
    specs = distinct(resolve_devices(expand(StepSpec, values)))

    from stepgauge.bench.jobs import job_of

    jobs = [job_of(spec, out) for spec in specs]
    store = RunStore(out)
    modelled = predict_before(specs, hardware, store)
    records = run_jobs(jobs, store, fresh=fresh)
    print_records(records, format)
    if format == "table":
        print_errors(modelled, records)
    require_success(records)
