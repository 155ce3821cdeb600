"""`stepgauge bench data-parallel`."""

from pathlib import Path

from stepgauge.cli.console import print_records
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
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.store import RunStore


@spec_options(DataParallelSpec, ModelSpec, sweep=True, defaults={"size": "small", "device": "auto"})
def data_parallel(
    *,
    values: Values,
    out: Out = Path("runs/bench-data-parallel"),
    fresh: Fresh = False,
    format: RowFormat = "table",
) -> None:
    """Time a training step spread over ranks: phases, communication, overlap, memory.

    The network is a preset, a shape, or your own (--model FILE.py:factory). Every option takes
    several values, and their product is measured, each row by ranks of its own: started here, or
    those of torchrun. Of each step the slowest rank counts. Bucket sizes vary only wrappers that
    have buckets.
    """
    specs = distinct(resolve_devices(expand(DataParallelSpec, values)))

    from stepgauge.bench.jobs import job_of

    records = run_jobs([job_of(spec, out) for spec in specs], RunStore(out), fresh=fresh)
    print_records(records, format)
    require_success(records)
