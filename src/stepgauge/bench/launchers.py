"""What launched this package's kernels in a run, named in its record: a library, where it ran a pass
of attention.
"""

import dataclasses

from stepgauge.kernels.attention import libraries
from stepgauge.spec.fallbacks import NATIVE
from stepgauge.spec.record import Record


def start_counting() -> None:
    """What `with_launchers` names is what ran from here on."""
    libraries.calls.clear()


def with_launchers(record: Record) -> Record:
    """The record of a run in this process with what launched its kernels."""
    if not libraries.calls:
        return record
    paths = {f"attention's {passes}": titles for passes, titles in libraries.served().items()}
    return dataclasses.replace(record, environment={**record.environment, NATIVE: paths})
