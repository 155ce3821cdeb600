"""`stepgauge calibrate`: this machine as a hardware file that steps are predicted from."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import tell
from stepgauge.cli.rows import Fresh, Out, run_jobs
from stepgauge.spec.calibration import CalibrationSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.store import RunStore


def calibrate(
    hardware: Annotated[Path, Parameter(help="The hardware file; made, or brought up to date.")],
    /,
    *,
    only: Annotated[
        str, Parameter(help="Operations whose name contains this; without it all.")
    ] = "",
    device: Annotated[str, Parameter(help="As in bench step.")] = "auto",
    out: Out = Path("runs/calibrate"),
    fresh: Fresh = False,
) -> None:
    """Time the operations that steps are made of, and write them to a hardware file.

    Products, attention, norms, memory traffic, optimizers and the host's launches, each over a
    grid of shapes, at the clocks that the GPU holds under load. Some 5 minutes on a GPU. Rows are
    on disk one by one, and the same command goes on where it stopped. What collectives cost joins
    the file with `stepgauge bench comm` and `stepgauge comm fit --hardware FILE`.
    """
    from stepgauge.bench.sweep import Job
    from stepgauge.calibrate.run import hardware_file, names, run
    from stepgauge.measure.devices import resolve

    before = HardwareFile.read(hardware) if hardware.exists() else HardwareFile(name=hardware.stem)
    where = resolve(device)
    asked = [name for name in names(where) if only in name]
    if not asked:
        raise ValueError(f"only is {only!r}; operations are {', '.join(names(where))}")
    specs = [CalibrationSpec(operation=name, device=str(where)) for name in asked]
    jobs = [Job(run, spec, process="calibration") for spec in specs]
    records = [
        record for record in run_jobs(jobs, RunStore(out), fresh=fresh) if record.status == "ok"
    ]
    hardware_file(before.name, records, before).write(hardware)
    tell(f"{len(records)} operations in {hardware}")
