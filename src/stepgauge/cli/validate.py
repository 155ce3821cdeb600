"""`stepgauge validate`: steps predicted, then run, then compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_tables, tell
from stepgauge.cli.options import Values, spec_options
from stepgauge.cli.predictions import (
    Hardware,
    hardware_of,
    predict_rows,
    tell_of_other_devices,
    why_no_hardware,
)
from stepgauge.cli.records import write_page
from stepgauge.cli.rows import (
    Fresh,
    Out,
    require_success,
    resolve_devices,
    run_jobs,
    store_for,
)
from stepgauge.cost.traced.asked import has_formulas
from stepgauge.spec.blocks import blocks_of
from stepgauge.spec.calibration import CalibrationSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.validate.rows import Asked, read_list, specs_of, usual_rows

if TYPE_CHECKING:
    from stepgauge.bench.sweep import Job
    from stepgauge.spec.record import Record

HOST_NOW = "its host was timed right before"


@spec_options(StepSpec, ModelSpec, sweep=True)
def validate(
    rows: Annotated[
        Path | None, Parameter(help="TOML file of [[rows]]; docs/validate.md has one.")
    ] = None,
    /,
    *,
    values: Values,
    layout: Annotated[
        tuple[str, ...],
        Parameter(
            help='How each step is spread: none "dp2 zero1" "tp2". The batch is that of all ranks.',
        ),
    ] = (),
    hardware: Hardware = None,
    out: Out = Path("runs/validate"),
    blocks: Annotated[
        bool,
        Parameter(
            help="First time a few blocks of each network at the shapes of its rows: two seconds "
            "each, compiled ones a minute. The hardware file with them is in the run.",
        ),
    ] = False,
    now: Annotated[
        bool,
        Parameter(
            negative="",
            help="First time the operations of the rows at their very shapes, a tenth of a second "
            "each, and right before each row what its launches take of the host: compiled rows take "
            "a quarter of a minute more, those of several ranks are left out. The hardware file "
            "with them is in the run.",
        ),
    ] = False,
    fresh: Fresh = False,
    format: Annotated[Format, Parameter(help="How the errors are printed.")] = "table",
) -> None:
    """Predict a list of steps and layouts, run them, and show how far the predictions are off.

    Every prediction is on disk before the first row is run. The errors are signed and itemised;
    layouts that do the same step are ranked. Without a list or options a few usual layouts of this
    machine are validated. The page of the run has the plot.
    """
    asked = _asked(rows, values, layout)
    path = hardware or hardware_of(asked[0].spec.device)
    if path is None:
        raise ValueError(why_no_hardware(asked[0].spec.device))
    if blocks:
        path = with_timed_blocks(asked, path, out, fresh=fresh)
    if now:
        path = with_asked_shapes(asked, path, out, fresh=fresh)
    compare(asked, path, out=out, fresh=fresh, format=format, host=now)


def with_timed_blocks(asked: Sequence[Asked], hardware: Path, out: Path, *, fresh: bool) -> Path:
    """The hardware file with the blocks of the rows' networks, in the run; these are timed now."""
    from stepgauge.calibrate import blocks

    specs = [row.spec for row in asked if has_formulas(row.spec)]
    found = dict.fromkeys(few for spec in specs for few in blocks_of(spec))
    records = run_jobs([blocks.job(spec) for spec in found], out / "blocks", fresh=fresh)
    path = out / "hardware.json"
    blocks.with_blocks(HardwareFile.read(hardware), records).write(path)
    timed = sum(record.status == "ok" for record in records)
    tell(f"blocks of {timed} of {len(found)} networks are in {path}")
    return path


def with_asked_shapes(asked: Sequence[Asked], hardware: Path, out: Path, *, fresh: bool) -> Path:
    """The hardware file with the operations of the rows at their shapes, in the run; they are timed
    now.
    """
    import torch

    from stepgauge.calibrate.run import with_operations
    from stepgauge.calibrate.step_shapes import shape_jobs
    from stepgauge.validate.predicted import shapes_of

    file = HardwareFile.read(hardware)
    specs = [row.spec for row in asked]
    jobs = shape_jobs(shapes_of(specs, file), torch.device(specs[0].device))
    records = run_jobs(jobs, out / "shapes", fresh=fresh)
    path = out / "hardware.json"
    with_operations(file, [r for r in records if r.status == "ok"]).write(path)
    timed = sum(int(record.median("shapes") or 0) for record in records)
    tell(f"{timed} shapes of {len(jobs)} operations are in {path}")
    return path


def compare(
    asked: Sequence[Asked],
    hardware: Path,
    *,
    out: Path,
    fresh: bool,
    format: Format,
    host: bool = False,
) -> None:
    """Predicts the steps from the hardware file, runs them, prints the errors, writes the page; with
    `host` each row after what its launches take of the host was timed.

    Raises RunFailedError if a step fails.
    """
    from stepgauge.bench.jobs import checked_jobs
    from stepgauge.report.prediction_tables import error_table, group_table

    specs = [row.spec for row in asked]
    jobs = checked_jobs(specs, out)
    expected = [row.expect for row in asked]
    if host:
        predictions, measured = _row_by_row(asked, jobs, hardware, out, fresh=fresh)
    else:
        predictions = predict_rows(specs, out, hardware, fresh=fresh, expected=expected)
        measured = run_jobs(jobs, out, fresh=fresh)
    records = [*predictions, *measured]
    if predictions:
        tell_of_other_devices(predictions, measured)
    print_tables(format, [error_table(records, unpredicted=True), group_table(records)])
    write_page(out)
    require_success(measured)


def _row_by_row(
    asked: Sequence[Asked], jobs: Sequence["Job"], hardware: Path, out: Path, *, fresh: bool
) -> tuple[list["Record"], list["Record"]]:
    """Of each row its prediction, written when its host has been timed and before it is run, and
    what was measured.
    """
    from stepgauge.calibrate.run import with_operations
    from stepgauge.calibrate.step_shapes import host_job, usual_host
    from stepgauge.validate.predict_first import predict_before

    file, store = HardwareFile.read(hardware), store_for(out)
    probes = [host_job(row.spec, turn) for turn, row in enumerate(asked, 1)]
    after = {p.asked.key: row for p, row in zip(probes, asked, strict=True) if p}
    predictions = predict_rows(
        [row.spec for row, probe in zip(asked, probes, strict=True) if not probe],
        out, hardware, fresh=fresh, is_asked=False,
        expected=[row.expect for row, probe in zip(asked, probes, strict=True) if not probe],
    )  # fmt: skip

    hosts: list[Record] = []

    def predict(job: "Job", record: "Record") -> None:
        row = after.get(job.asked.key)
        if row is None:
            return
        if record.status == "ok":
            hosts.append(record)
        now = with_operations(file, [usual_host(hosts)] if record.status == "ok" else [])
        expected = "; ".join(filter(None, (HOST_NOW, row.expect)))
        made = predict_before([row.spec], now, store, fresh=fresh, expected=[expected])
        predictions.extend(made.records)
        for reason in made.refused:
            tell(f"not predicted: {reason}")

    order = [each for pair in zip(probes, jobs, strict=True) for each in pair if each]
    records = run_jobs(order, out, fresh=fresh, then=predict)
    return predictions, [record for record in records if record.kind != CalibrationSpec.kind]


def _asked(path: Path | None, values: Values, layouts: tuple[str, ...]) -> list[Asked]:
    """The rows of the list, of the options, or the usual ones, on devices that are there."""
    if path is not None:
        if layouts:
            raise ValueError(f"layout is {layouts[0]!r}; the rows of {path} have their own")
        found = read_list(path, values)
    elif values or layouts:
        found = [Asked(spec) for spec in specs_of(values, layouts or ("none",))]
    else:
        import torch

        found = usual_rows(torch.cuda.device_count())
    specs = resolve_devices([row.spec for row in found])
    return [Asked(spec, row.expect) for spec, row in zip(specs, found, strict=True)]
