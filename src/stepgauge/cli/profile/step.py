"""`stepgauge profile step`."""

import functools
from pathlib import Path

from stepgauge.cli.console import print_records, print_table, tell
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
from stepgauge.report.names import labels
from stepgauge.report.profile import phases_table, tables
from stepgauge.spec.analysis import Analysis
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.profile import ProfileSpec
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore


@spec_options(ProfileSpec, ModelSpec, sweep=True, defaults={"size": "small", "device": "auto"})
def step(
    *,
    values: Values,
    out: Out = Path("runs/profile-step"),
    fresh: Fresh = False,
    format: RowFormat = "table",
) -> None:
    """Profile a training step: kernels by kind, phase and part of the model, idle time, flame
    graph.

    The step is timed by the stopwatch first, then recorded by torch.profiler, and both stand side
    by side. Each row leaves a folder with its Chrome trace (opens in Perfetto), speedscope JSON,
    collapsed stacks and analysis. All rows of the run are in its report.html. Every option takes
    several values, and their product is profiled.
    """
    specs = resolve_devices(distinct(expand(ProfileSpec, values)))

    from stepgauge.bench import profile
    from stepgauge.bench.sweep import Job

    for spec in specs:
        profile.check(spec)
    run = functools.partial(profile.run, folder=out)
    records = run_jobs([Job(run, spec) for spec in specs], RunStore(out), fresh=fresh)
    if format == "table":
        everything = [
            record for record in RunStore(out).read().latest() if record.kind == ProfileSpec.kind
        ]
        report = profile.write_report(
            [(record, profile.read(record, out)) for record in everything], out
        )
        tell(f"report: {report}")
        found = [(record, profile.read(record, out)) for record in records]
        for name, (record, analysis) in zip(labels(records), found, strict=True):
            _print(name, record, analysis, brief=len(found) > 1)
    else:
        print_records(records, format)
    require_success(records)


def _print(name: str, record: Record, found: Analysis | None, *, brief: bool) -> None:
    print(f"\n{name}" + ("" if found else f": {record.status.upper()}, {record.note}"))
    if found:
        for table in [phases_table(found)] if brief else tables(found):
            print()
            print_table(table)
