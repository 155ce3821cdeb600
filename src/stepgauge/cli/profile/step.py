"""`stepgauge profile step`."""

from pathlib import Path

from stepgauge.cli import rows
from stepgauge.cli.console import print_records, print_table, tell
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

    The step is timed by the stopwatch first, then recorded by torch.profiler, and both stand side
    by side. Each row leaves a folder with its Chrome trace (opens in Perfetto) and its analysis. All
    rows of the run are in its report.html. Every option takes several values, and their product is
    profiled. Where this device has a hardware file, the terms of the predicted step stand beside
    the kernels.
    """
    specs = rows.with_devices(rows.distinct(expand(ProfileSpec, values)))
    specs = list(dict.fromkeys(specs))
    records = rows.measured(specs, out, fresh=fresh)

    from stepgauge.report import profile_page

    if format == "table":
        write_page(out)
        found = [(record, profile_page.read(record, out)) for record in records]
        path = hardware or hardware_of(specs[0].device)
        for name, spec, (record, analysis) in zip(labels(records), specs, found, strict=True):
            _print(name, record, analysis, brief=len(found) > 1)
            if path and analysis:
                _print_predicted(spec, path, analysis)
    else:
        print_records(records, format)
    rows.require_success(records)


def _print(name: str, record: Record, found: Analysis | None, *, brief: bool) -> None:
    print(f"\n{name}" + ("" if found else f": {record.status.upper()}, {record.note}"))
    if found:
        if said := remark(record):
            print(f"\n{said}")
        for table in [phases_table(found)] if brief else tables(found):
            print()
            print_table(table)


def _print_predicted(spec: ProfileSpec, hardware: Path, found: Analysis) -> None:
    """The terms of the step beside its kernels, or why it is not predicted."""
    from stepgauge.validate.kernels import kernels_beside
    from stepgauge.validate.predicted import predicted

    if spec.device.startswith("cuda") and not found.on_device:
        tell("no prediction beside the kernels: the trace has none of the GPU's")
        return
    try:
        prediction = predicted(spec, HardwareFile.read(hardware))
    except ValueError as error:
        tell(f"not predicted: {error}")
        return
    print()
    print_table(kernels_beside(prediction, found))
