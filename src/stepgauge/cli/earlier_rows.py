"""Rows that the same command has measured before, found and shown without loading torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.runtime.host import available_cores, cpu_name, installed_torch, thread_settings
from stepgauge.runtime.torchrun import torchrun_numbers
from stepgauge.spec.record import Record
from stepgauge.spec.store import FILE_NAME, RunStore


def earlier_rows(
    specs: Sequence[Any], out: Path, provenances: Sequence[str] = ("measured",)
) -> list[Record]:
    """The run's records of each spec, in their order, as a sweep would find them; none where it has
    to look itself: a row is missing, or is of a GPU, which torch alone can name.
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
    rows = [known.get((Record.of(spec).key, p)) for spec in specs for p in provenances]
    return [] if None in rows else [row for row in rows if row]
