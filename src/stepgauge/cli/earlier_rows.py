"""Rows that the same command has measured before, found and shown without loading torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.runtime.host import available_cores, cpu_name, installed_torch, thread_settings
from stepgauge.runtime.torchrun import torchrun_numbers
from stepgauge.spec.record import Record
from stepgauge.spec.store import FILE_NAME, RunStore


def earlier_rows(specs: Sequence[Any], out: Path) -> list[Record]:
    """The run's records of each spec, of each provenance that it has rows of, in the order of a sweep;
    none where the sweep has to look itself: a row is missing, or is of a GPU, which torch alone can
    name.
    """
    if torchrun_numbers() or any(spec.device != "cpu" for spec in specs):
        return []
    contents = RunStore(out).read() if (out / FILE_NAME).exists() else None
    if contents is None or contents.problems:
        return []
    here = {
        "device": cpu_name(),
        "torch": installed_torch()["__version__"],
        "cores": available_cores(),
        "thread_settings": thread_settings(),
    }
    known = {
        (record.key, record.provenance): record
        for record in contents.records
        if record.status != "failed" and here.items() <= record.environment.items()
    }
    asked = [
        (Record.of(spec).key, provenance)
        for spec in specs
        for provenance in getattr(spec, "provenances", ("measured",))
    ]
    is_complete = all(row in known for row in asked)
    return [known[row] for row in asked] if is_complete else []
