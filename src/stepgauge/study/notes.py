"""Files that a study writes next to its records, so that its page can be written on another machine
and without torch.
"""

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

ROWS_FILE = "experiments.json"  # the ids of each experiment's rows, in the order of its section


def write_machine(machine: StudyMachine, folder: Path) -> None:
    """Writes the machine. Like write_rows, raises StoreError if the file cannot be written."""
    _write(folder / MACHINE_FILE, dataclasses.asdict(machine))


def read_machine(folder: Path) -> StudyMachine | None:
    """Returns the machine of a study, or None if the run is not a study."""
    try:
        return StudyMachine(**json.loads((folder / MACHINE_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_rows(experiments: Sequence[Experiment], machine: StudyMachine, folder: Path) -> None:
    """Writes the ids of the rows that each experiment measures on the machine, and keeps those of other
    experiments.
    """
    ids = {
        e.name: [row_id(job.pending) for job in e.jobs(machine, folder)]
        for e in experiments
        if e.needs(machine) is None
    }
    _write(folder / ROWS_FILE, {**read_rows(folder), **ids})


def read_rows(folder: Path) -> dict[str, list[str]]:
    """Returns the row ids of each experiment, or {} if the study has no such file."""
    try:
        ids: dict[str, list[str]] = json.loads((folder / ROWS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return ids


def row_id(record: Record) -> str:
    """Returns a short hash of the record's spec and provenance."""
    return hashlib.sha256(f"{record.provenance} {record.key}".encode()).hexdigest()[:16]


def _write(path: Path, content: Any) -> None:
    try:
        path.write_text(json.dumps(content))
    except OSError as error:
        raise StoreError(f"cannot write to {path.parent}: {error.strerror}") from None
