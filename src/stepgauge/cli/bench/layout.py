"""`stepgauge bench layout`."""

from pathlib import Path

from stepgauge.cli.bench.pipeline import Networks
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
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.store import RunStore


@spec_options(
    LayoutSpec,
    Networks,
    sweep=True,
    defaults={"size": "small", "device": "auto", "layout": ("none", "dp2", "tp2")},
)
def layout(
    *,
    values: Values,
    out: Out = Path("runs/bench-layout"),
    fresh: Fresh = False,
    format: RowFormat = "table",
    hardware: Hardware = None,
    no_predict: NoPredict = False,
) -> None:
    """Time a training step under layouts: phases, exposed communication by axis, memory by part.

    A layout is a text: "dp2 zero3 tp2" or "pp2 1f1b m8 tp2" (docs/layouts.md). The batch is that of
    all ranks, so that rows of one batch do the same step. Your own network (--model
    FILE.py:factory) takes layouts with a data axis, and brings a batch for each data rank. Every
    option takes several values, and their product is measured, each row by ranks of its own:
    started here, or those of torchrun. Where this device was calibrated, each row shows what was
    predicted before it was run.
    """
    specs = distinct(resolve_devices(expand(LayoutSpec, values, network=Networks)))

    from stepgauge.bench.jobs import job_of

    jobs = [job_of(spec, out) for spec in specs]
    predictions = predict_rows(specs, out, hardware=hardware, no_predict=no_predict, fresh=fresh)
    records = run_jobs(jobs, RunStore(out), fresh=fresh)
    print_beside(predictions, records, format)
    require_success(records)
