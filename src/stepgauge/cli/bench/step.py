"""`stepgauge bench step`."""

from pathlib import Path

from stepgauge.cli.beside import Hardware, NoPredict, predict_rows, print_beside
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
    hardware: Hardware = None,
    no_predict: NoPredict = False,
) -> None:
    """Time a training step: forward, backward, optimizer and whole.

    The network is a preset, a shape, or your own (--model FILE.py:factory). Every option takes
    several values, and their product is measured. Each row is on disk the moment it is measured;
    the same command again goes on where it stopped. A size that does not fit gives a row that says
    OOM. Where this device was calibrated, each row shows what was predicted before it was run.
    """
    specs = resolve_devices(distinct(expand(StepSpec, values)))

    from stepgauge.bench.jobs import job_of

    jobs = [job_of(spec, out) for spec in specs]
    predictions = predict_rows(specs, out, hardware=hardware, no_predict=no_predict, fresh=fresh)
    records = run_jobs(jobs, RunStore(out), fresh=fresh)
    print_beside(predictions, records, format)
    require_success(records)
