"""Finds rows that the same command measured before, without importing torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.runtime.host import available_cores, cpu_name, installed_torch, thread_settings
from stepgauge.runtime.torchrun import torchrun_numbers
from stepgauge.spec.record import Record
from stepgauge.spec.store import FILE_NAME, RunStore


def earlier_rows(specs: Sequence[Any], out: Path) -> list[Record]:
    """Returns the stored records of all specs and of all their provenances, in the order of a sweep.

    Returns an empty list, so that the caller runs the sweep, if a row is missing or ran on a GPU:
    only torch can tell whether that GPU is the one in this machine.
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
    stored = {
        (record.key, record.provenance): record
        for record in contents.records
        if record.status != "failed" and here.items() <= record.environment.items()
    }
    requested = [
        (Record.of(spec).key, provenance)
        for spec in specs
        for provenance in getattr(spec, "provenances", ("measured",))
    ]
    is_complete = all(row in stored for row in requested)
    return [stored[row] for row in requested] if is_complete else []
