"""`stepgauge calibrate`: measures this machine and writes a hardware file for predictions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import info
from stepgauge.cli.rows import Device, Fresh, Out, require_success, run_jobs
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.spec.hardware import HardwareFile, require_writable
from stepgauge.spec.hardware_files import default_path
from stepgauge.spec.record import Record

Ranks = Annotated[
    tuple[int, ...],
    Parameter(
        help="Also time collectives between this many ranks, such as 2 or 2 4 8, and how much "
        "collectives and kernels slow each other down.",
    ),
]


def calibrate(
    hardware: Annotated[
        Path | None,
        Parameter(help="Hardware file to create or update. [default: the file of this device]"),
    ] = None,
    /,
    *,
    ranks: Ranks = (),
    only: Annotated[
        tuple[str, ...],
        Parameter(
            help="Only parts whose names contain one of these words: matmul, links, ... [default: all]"
        ),
    ] = (),
    device: Device = "auto",
    out: Out = Path("runs/calibrate"),
    fresh: Fresh = False,
) -> None:
    """Time the operations that training steps consist of, and write a hardware file for predictions.

    Times matrix products, attention, norms, memory traffic, optimizers and kernel launches of the
    host, each over a grid of shapes and at the clock rates that the device sustains under load; with
    --ranks also collectives, and the host while ranks share it. Takes about 9 minutes on a GPU and 2 on
    a CPU; for each number of --ranks, 2 to 3 more. Each row is saved as soon as it is measured; rerun
    the command to continue. With the default file, bench commands on this device then print predictions
    next to measurements; with another file, give them --hardware.
    """
    if few := [number for number in ranks if number < 2]:
        raise ValueError(f"ranks is {few[0]}; collectives need at least 2")

    from stepgauge.calibrate import machine
    from stepgauge.measure.devices import resolve
    from stepgauge.runtime.workers import run_isolated

    torch_device = resolve(device)
    jobs = machine.jobs(torch_device, ranks, only)
    name, threads = run_isolated(machine.this_machine, torch_device)
    path = hardware or default_path(name)
    before = HardwareFile.read(path) if path.exists() else HardwareFile(name=path.stem)
    machine.require_same_machine(before, name, threads)
    require_writable(path.resolve())  # before anything is measured
    records = run_jobs(jobs, out, fresh=fresh)
    if not any(record.status == "ok" for record in records):
        require_success(records)
    calibrated = machine.hardware_file(records, before)
    _write(calibrated, path, records)
    if missing := machine.missing_shapes(records):
        info(missing)
    _suggest(calibrated, path, is_default=path == default_path(name))


def _write(hardware: HardwareFile, path: Path, records: Sequence[Record]) -> None:
    """Writes the file and prints how many of the rows it contains."""
    hardware.write(path)
    ok = sum(record.status == "ok" for record in records)
    info(f"{ok} of {len(records)} rows are in {path}")
    if hardware.disturbance:
        info(hardware.disturbance)


def _suggest(hardware: HardwareFile, path: Path, *, is_default: bool) -> None:
    """Prints which commands use the file, or why no step can be predicted from it."""
    try:
        CalibratedMachine(hardware).traffic(1.0)  # every prediction needs it
    except ValueError as error:
        info(f"no step can be predicted yet: {error}")
        return
    info(f"to predict a step on this machine: stepgauge predict --size small --hardware {path}")
    if not is_default:
        info(f"to see predictions next to measurements, give bench commands --hardware {path}")
