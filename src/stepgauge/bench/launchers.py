"""A row's function run in this process, within its memory, and what launched this package's kernels
meanwhile: a library, where it ran a pass of attention.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from stepgauge.kernels.attention import libraries
from stepgauge.measure.devices import limit_host_memory, out_of_memory_reason
from stepgauge.spec.fallbacks import NATIVE
from stepgauge.spec.record import Record


def run_here(run: Callable[[Any], Any], spec: Any) -> Any:
    """What the function gives of the spec. Raises MemoryError, with the reason, where memory ran
    out.
    """
    libraries.calls.clear()  # what `with_launchers` names is what ran from here on
    if spec.device == "cpu":
        limit_host_memory()
    try:
        return run(spec)
    except Exception as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
        raise MemoryError(reason) from error


def with_launchers(record: Record) -> Record:
    """The record of a run in this process with what launched its kernels."""
    if not libraries.calls:
        return record
    by_pass = libraries.titles_by_pass()
    paths = {f"attention's {passes}": titles for passes, titles in by_pass.items()}
    return dataclasses.replace(record, environment={**record.environment, NATIVE: paths})
