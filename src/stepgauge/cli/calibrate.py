"""`stepgauge calibrate`: this machine as a hardware file that steps are predicted from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import tell
from stepgauge.cli.rows import Device, Fresh, Out, require_success, run_jobs
from stepgauge.spec.hardware import HardwareFile, draft_of
from stepgauge.spec.hardware_files import default_path
from stepgauge.spec.record import Record

Ranks = Annotated[
    tuple[int, ...],
    Parameter(
        help="Also collectives between so many ranks, and what they and kernels cost each other: "
        "2, or 2 4 8.",
    ),
]


def calibrate(
    hardware: Annotated[
        Path | None,
        Parameter(help="The hardware file; made, or brought up to date. [that of this device]"),
    ] = None,
    /,
    *,
    ranks: Ranks = (),
    only: Annotated[
        tuple[str, ...],
        Parameter(help="What has one of these in its name: matmul, links, contention. [all]"),
    ] = (),
    device: Device = "auto",
    out: Out = Path("runs/calibrate"),
    fresh: Fresh = False,
) -> None:
    """Time what steps are made of, and write it to a hardware file that they are predicted from.

    Products, attention, norms, memory traffic, optimizers and the host's launches, each over a
    grid of shapes, at the clocks that the device holds under load; with --ranks collectives, too.
    Some 3 minutes on a GPU, 2 on a CPU. Rows are on disk one by one, and the same command goes on
    where it stopped. From then on bench commands on this device show what was predicted beside what
    they measure.
    """
    if few := [number for number in ranks if number < 2]:
        raise ValueError(f"ranks is {few[0]}; collectives need at least 2")

    from stepgauge.calibrate import machine
    from stepgauge.measure.devices import resolve
    from stepgauge.runtime.workers import run_isolated

    where = resolve(device)
    asked = machine.jobs(where, ranks, only)
    name, threads = run_isolated(machine.this_machine, where)
    path = hardware or default_path(name)
    before = HardwareFile.read(path) if path.exists() else HardwareFile(name=path.stem)
    machine.require_same_machine(before, name, threads)
    draft_of(path).unlink()  # a path that cannot be written is told before anything is measured
    records = run_jobs(asked, out, fresh=fresh)
    if not any(record.status == "ok" for record in records):
        require_success(records)
    _write(machine.hardware_file(records, before), path, records)


def _write(hardware: HardwareFile, path: Path, records: Sequence[Record]) -> None:
    """Writes the file, and tells how much is in it."""
    hardware.write(path)
    good = sum(record.status == "ok" for record in records)
    tell(f"{good} of {len(records)} rows are in {path}")
    if hardware.disturbance:
        tell(hardware.disturbance)
    tell(f"a step on this machine: stepgauge predict --size small --hardware {path}")
