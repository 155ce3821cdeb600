"""What launches this package's kernels in a run: C++ is built before it, and named in its record, as
is cuDNN where it ran a pass of attention.
"""

import dataclasses
from typing import Any

from stepgauge.kernels.attention import cudnn
from stepgauge.runtime.extension import prepare, served
from stepgauge.spec.fallbacks import NATIVE, ours_asked
from stepgauge.spec.record import Record


def prepare_for(spec: Any) -> None:
    """Builds or loads the C++ launches where the spec asks for a kernel of ours; counts from here."""
    asked = ours_asked(Record(kind=spec.kind, spec=dataclasses.asdict(spec)))
    prepare(spec.device if asked else "cpu")  # for "cpu" nothing is built
    cudnn.calls.clear()


def with_launchers(record: Record) -> Record:
    """The record of a run in this process with what launched its kernels."""
    paths = served() | {f"attention's {name}": "cuDNN" for name in cudnn.calls}
    if not paths:
        return record
    return dataclasses.replace(record, environment={**record.environment, NATIVE: paths})
