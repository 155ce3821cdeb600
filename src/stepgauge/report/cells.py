"""The cells of an analysis added up."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from stepgauge.report.kernel_names import shortened
from stepgauge.spec.analysis import Analysis, Cell

LONGEST_NAME = 72


@dataclasses.dataclass(frozen=True)
class Sum:
    """Several cells together, in one step."""

    calls: float = 0.0
    us: float = 0.0
    busy_us: float = 0.0
    idle_us: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


FIGURES = [field.name for field in dataclasses.fields(Sum)]


def total(cells: Iterable[Cell], steps: int) -> Sum:
    cells = list(cells)
    return Sum(*(sum(getattr(cell, name) for cell in cells) / steps for name in FIGURES))


def sums_by(found: Analysis, *fields: str) -> dict[tuple[str, ...], Sum]:
    """The sum of the cells that agree in these fields, by their values, most time first."""
    groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in found.cells:
        groups[tuple(getattr(cell, name) for name in fields)].append(cell)
    sums = {values: total(cells, found.steps) for values, cells in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].us))


def short_name(name: str) -> str:
    """A kernel's, as tables have it."""
    return shortened(name, LONGEST_NAME)
