"""`stepgauge validate`: predicts steps, runs them, and prints the errors of the predictions."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, counted, info, print_tables
from stepgauge.cli.options import Values, spec_options
from stepgauge.cli.predictions import (
    Hardware,
    hardware_of,
    note_other_device,
    predict_rows,
    why_no_hardware,
)
from stepgauge.cli.records import write_page
from stepgauge.cli.rows import (
    Fresh,
    Out,
    require_success,
    resolve_devices_and_models,
    run_jobs,
    store_for,
)
from stepgauge.cost.traced.traceable import has_formulas
from stepgauge.report.names import layout_labels
from stepgauge.spec.blocks import blocks_of
from stepgauge.spec.calibration import CalibrationSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.steps import as_layout_record
from stepgauge.validate.rows import ValidationRow, default_rows, read_list, specs_of

if TYPE_CHECKING:
    from stepgauge.bench.sweep import Job
    from stepgauge.spec.record import Record

HOST_NOTE = "the host's launches were timed right before the row"


@spec_options(StepSpec, ModelSpec, sweep=True, shown={"size": "", "device": "auto"})
def validate(
    rows: Annotated[
        Path | None, Parameter(help="TOML file with [[rows]]; see docs/validate.md.")
    ] = None,
    /,
    *,
    values: Values,
    layout: Annotated[
        tuple[str, ...],
        Parameter(
            help='Layouts of each step, such as: none "dp2 zero1" "tp2". The batch is that of all '
            "ranks.",
        ),
    ] = (),
    hardware: Hardware = None,
    out: Out = Path("runs/validate"),
    blocks: Annotated[
        bool,
        Parameter(
            help="First time a few blocks of each network at the shapes of its rows. Takes two "
            "seconds per network, compiled a minute. The run folder gets the extended hardware file.",
        ),
    ] = False,
    now: Annotated[
        bool,
        Parameter(
            negative="",
            help="First time the operations of the rows at their exact shapes, a tenth of a second "
            "each; and right before each row of one rank, the host's kernel launches, which adds 15 "
            "seconds to compiled rows. The run folder gets the extended hardware file.",
        ),
    ] = False,
    fresh: Fresh = False,
    format: Annotated[Format, Parameter(help="Output format.")] = "table",
) -> None:
    """Predict a list of steps and layouts, run them, and print how far off the predictions are.

    All predictions are on disk before the first row is run. Errors are signed and broken down by
    part, and layouts of the same step are ranked. Without a list or options, a few common layouts for
    this machine are validated. The run's report.html has a plot.
    """
    requested = _requested_rows(rows, values, layout)
    path = hardware or hardware_of(requested[0].spec.device)
    if path is None:
        raise ValueError(why_no_hardware(requested[0].spec.device))
    if blocks:
        path = with_timed_blocks(requested, path, out, fresh=fresh)
    if now:
        path = with_timed_shapes(requested, path, out, fresh=fresh)
    compare(requested, path, out=out, fresh=fresh, format=format, host=now)


def with_timed_blocks(
    rows: Sequence[ValidationRow], hardware: Path, out: Path, *, fresh: bool
) -> Path:
    """Times a few blocks of the rows' networks. Returns the path of a hardware file in the run folder
    that contains them.
    """
    from stepgauge.calibrate import blocks

    specs = [row.spec for row in rows if has_formulas(row.spec)]
    networks = dict.fromkeys(few for spec in specs for few in blocks_of(spec))
    records = run_jobs([blocks.job(spec) for spec in networks], out / "blocks", fresh=fresh)
    path = out / "hardware.json"
    blocks.with_blocks(HardwareFile.read(hardware), records).write(path)
    timed = sum(record.status == "ok" for record in records)
    info(f"blocks of {timed} of {len(networks)} networks are in {path}")
    return path


def with_timed_shapes(
    rows: Sequence[ValidationRow], hardware: Path, out: Path, *, fresh: bool
) -> Path:
    """Times the operations of the rows at their shapes. Returns the path of a hardware file in the
    run folder that contains them.
    """
    import torch

    from stepgauge.calibrate.run import with_operations
    from stepgauge.calibrate.step_shapes import shape_jobs
    from stepgauge.validate.predicted import shapes_of

    file = HardwareFile.read(hardware)
    specs = [row.spec for row in rows]
    jobs = shape_jobs(shapes_of(specs, file), torch.device(specs[0].device))
    records = run_jobs(jobs, out / "shapes", fresh=fresh)
    path = out / "hardware.json"
    with_operations(file, [r for r in records if r.status == "ok"]).write(path)
    timed = sum(int(record.median("shapes") or 0) for record in records)
    are = "is" if timed == 1 else "are"
    info(f"{counted(timed, 'shape')} of {counted(len(jobs), 'operation')} {are} in {path}")
    return path


def compare(
    rows: Sequence[ValidationRow],
    hardware: Path,
    *,
    out: Path,
    fresh: bool,
    format: Format,
    host: bool = False,
) -> None:
    """Predicts the steps from the hardware file, runs them, prints the errors and writes the report.

    host  time the host's kernel launches right before each row, and predict the row from them

    Raises RunFailedError if a step fails.
    """
    from stepgauge.bench.jobs import checked_jobs
    from stepgauge.report.prediction_tables import error_table, group_table

    specs = [row.spec for row in rows]
    jobs = checked_jobs(specs, out)
    if host:
        predictions, measured = _row_by_row(rows, jobs, hardware, out, fresh=fresh)
    else:
        expected = [row.expect for row in rows]
        predictions = predict_rows(specs, out, hardware, fresh=fresh, expected=expected)
        measured = run_jobs(jobs, out, fresh=fresh, names_of=layout_labels)
    records = [*predictions, *measured]
    if predictions:
        note_other_device(predictions, measured)
    print_tables([error_table(records, unpredicted=True), group_table(records)], format)
    write_page(out)
    require_success([as_layout_record(record) for record in measured])


def _row_by_row(
    rows: Sequence[ValidationRow], jobs: Sequence["Job"], hardware: Path, out: Path, *, fresh: bool
) -> tuple[list["Record"], list["Record"]]:
    """Returns the predictions and the measured records. A row with a host probe, which times the host's
    launches, is predicted after it and before the row itself is run.
    """
    from stepgauge.calibrate.run import with_operations
    from stepgauge.calibrate.step_shapes import host_job, median_probe
    from stepgauge.validate.predict_first import predict_before

    file, store = HardwareFile.read(hardware), store_for(out)
    probes = [host_job(row.spec, turn) for turn, row in enumerate(rows, 1)]
    row_of_probe = {p.pending.key: row for p, row in zip(probes, rows, strict=True) if p}
    unprobed = [row for row, probe in zip(rows, probes, strict=True) if not probe]
    predictions = predict_rows(
        [row.spec for row in unprobed], out, hardware, fresh=fresh, is_requested=False,
        expected=[row.expect for row in unprobed],
    )  # fmt: skip

    probed: list[Record] = []

    def predict(job: "Job", record: "Record") -> None:
        row = row_of_probe.get(job.pending.key)
        if row is None:  # the job is a row, not a probe
            return
        if record.status == "ok":
            probed.append(record)
        is_timed = record.status == "ok"
        file_now = with_operations(file, [_of_row(median_probe(probed), row)] if is_timed else [])
        expected = "; ".join(filter(None, (HOST_NOTE if is_timed else "", row.expect)))
        made = predict_before([row.spec], file_now, store, fresh=fresh, expected=[expected])
        predictions.extend(made.records)
        for reason in made.refused:
            info(f"not predicted: {reason}")

    order = [each for pair in zip(probes, jobs, strict=True) for each in pair if each]
    records = run_jobs(
        order, out, fresh=fresh, names_of=layout_labels, after_row=predict,
        probes={probe.pending.identity for probe in probes if probe},
    )  # fmt: skip
    return predictions, [record for record in records if record.kind != CalibrationSpec.kind]


def _of_row(probe: "Record", row: ValidationRow) -> "Record":
    """Returns the probe as if all ranks of the row had run it. In a pipeline, those of one stage ran it."""
    return dataclasses.replace(probe, spec={**probe.spec, "ranks": row.spec.ranks})


def _requested_rows(
    path: Path | None, values: Values, layouts: tuple[str, ...]
) -> list[ValidationRow]:
    """Returns the rows of the list, of the options, or the default ones, with devices resolved."""
    if path is not None:
        if layouts:
            raise ValueError(f"layout is {layouts[0]!r}; the rows of {path} have their own")
        rows = read_list(path, values)
    elif values or layouts:
        rows = [ValidationRow(spec) for spec in specs_of(values, layouts or ("none",))]
    else:
        import torch

        rows = default_rows(torch.cuda.device_count())
    specs = resolve_devices_and_models([row.spec for row in rows])
    return [ValidationRow(spec, row.expect) for spec, row in zip(specs, rows, strict=True)]
