"""Which operations steps ask of a machine when they are predicted, at which sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.spec.hardware import HardwareFile
from stepgauge.validate.predicted import predicted

Shapes = Mapping[tuple[int, str], set[tuple[float, ...]]]  # by ranks and operation


def shapes_of(specs: Sequence[Any], hardware: HardwareFile) -> Shapes:
    """Of the steps that can be predicted; of others it is said where they are tried."""
    found: dict[tuple[int, str], set[tuple[float, ...]]] = {}
    for spec in specs:
        asked: set[tuple[str, tuple[float, ...]]] = set()
        try:
            predicted(spec, hardware, asked=asked)
        except ValueError:
            continue
        for operation, sizes in asked:
            found.setdefault((getattr(spec, "ranks", 1), operation), set()).add(sizes)
    return found
