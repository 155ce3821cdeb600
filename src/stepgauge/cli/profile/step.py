"""`stepgauge profile step`: profiles a training step with torch.profiler."""

from pathlib import Path

from stepgauge.cli import rows
from stepgauge.cli.console import info, print_records, print_table
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.predictions import Hardware, hardware_of
from stepgauge.cli.records import write_page
from stepgauge.report.names import labels
from stepgauge.report.profile import phases_table, tables
from stepgauge.report.views import remark
from stepgauge.spec.analysis import Analysis
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.profile import ProfileSpec
from stepgauge.spec.record import Record


@spec_options(ProfileSpec, ModelSpec, sweep=True, defaults={"size": "small", "device": "auto"})
def step(
    *,
    values: Values,
    out: rows.Out = Path("runs/profile-step"),
    fresh: rows.Fresh = False,
    hardware: Hardware = None,
    format: rows.RowFormat = "table",
) -> None:
    """Profile a training step: kernels by kind, phase and part of the model, idle time, flame
    graph.

    The step is first timed without the profiler and then recorded by torch.profiler; both times are
    shown. Each row gets a folder with its Chrome trace (opens in Perfetto) and its analysis, and the
    run's report.html shows all rows. Every option accepts several values; all combinations are
    profiled. If this device has a hardware file, the predicted terms of the step are printed next to
    the kernels.
    """
    specs = rows.resolve_devices(rows.canonical_specs(expand(ProfileSpec, values)))
    specs = list(dict.fromkeys(specs))
    records = rows.measure(specs, out, fresh=fresh)

    from stepgauge.report import profile_page

    if format == "table":
        write_page(out)
        path = hardware or hardware_of(specs[0].device)
        for name, spec, record in zip(labels(records), specs, records, strict=True):
            analysis = profile_page.read(record, out)
            _print_row(name, record, analysis, brief=len(records) > 1)
            if path and analysis:
                _print_predicted(spec, path, analysis)
    else:
        print_records(records, format)
    rows.require_success(records)


def _print_row(name: str, record: Record, analysis: Analysis | None, *, brief: bool) -> None:
    """Prints the tables of a row, if brief only its phases; without an analysis why it has none."""
    print(f"\n{name}" + ("" if analysis else f": {record.status.upper()}, {record.note}"))
    if analysis:
        if text := remark(record):
            print(f"\n{text}")
        for table in [phases_table(analysis)] if brief else tables(analysis):
            print()
            print_table(table)


def _print_predicted(spec: ProfileSpec, hardware: Path, analysis: Analysis) -> None:
    """Prints the predicted terms of the step next to its kernels, or why it is not predicted."""
    from stepgauge.validate.kernels import comparison_table
    from stepgauge.validate.predicted import predicted

    if spec.device.startswith("cuda") and not analysis.on_device:
        info("not predicted: the trace has no GPU kernels to compare with")
        return
    try:
        prediction = predicted(spec, HardwareFile.read(hardware))
    except ValueError as error:
        info(f"not predicted: {error}")
        return
    print()
    print_table(comparison_table(prediction, analysis))
