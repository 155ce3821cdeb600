"""What a study notes beside its records: its page can then be written elsewhere, and without torch."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.spec.experiments import MACHINE_FILE
from stepgauge.spec.record import Record
from stepgauge.spec.store import StoreError
from stepgauge.study.experiment import Experiment, StudyMachine

ASKED_FILE = "experiments.json"  # the rows of each experiment, in the order of its section


def remember(machine: StudyMachine, folder: Path) -> None:
    """Raises StoreError where it cannot be written, as remember_rows does."""
    _write(folder / MACHINE_FILE, dataclasses.asdict(machine))


def remembered(folder: Path) -> StudyMachine | None:
    """The machine of a study's run; None where the run is of another command."""
    try:
        return StudyMachine(**json.loads((folder / MACHINE_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def remember_rows(experiments: Sequence[Experiment], machine: StudyMachine, folder: Path) -> None:
    """Which rows each experiment asks for on the machine, beside those noted before."""
    asked = {
        e.name: [row_of(job.asked) for job in e.jobs(machine, folder)]
        for e in experiments
        if e.needs(machine) is None
    }
    _write(folder / ASKED_FILE, {**remembered_rows(folder), **asked})


def remembered_rows(folder: Path) -> dict[str, list[str]]:
    """By the names of experiments; nothing of a study that noted none."""
    try:
        found: dict[str, list[str]] = json.loads((folder / ASKED_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found


def row_of(record: Record) -> str:
    """What tells a study's rows apart, short."""
    return hashlib.sha256(f"{record.provenance} {record.key}".encode()).hexdigest()[:16]


def _write(path: Path, content: Any) -> None:
    try:
        path.write_text(json.dumps(content))
    except OSError as error:
        raise StoreError(f"cannot write to {path.parent}: {error.strerror}") from None
