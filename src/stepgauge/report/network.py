"""Pictures of who is connected to whom: boxes and lines between them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.report.figure import FAINT, GRID, INK, SERIES, canvas

Point = tuple[float, float]
LABEL_POINTS = 9  # from a line to its label


@dataclasses.dataclass(frozen=True)
class Edge:
    """A line between two boxes. A usual weight is 1."""

    source: str
    target: str
    label: str = ""
    weight: float = 1.0
    series: int = 0


def rows(levels: Sequence[Sequence[str]]) -> dict[str, Point]:
    """The boxes in rows, the first row at the top, each centred."""
    widest = max(len(level) for level in levels)
    step = [2.0 * widest / max(1, len(level)) for level in levels]
    return {
        name: ((i + 0.5) * step[row] - widest, -1.5 * row)
        for row, level in enumerate(levels)
        for i, name in enumerate(level)
    }


def network(places: Mapping[str, Point], edges: Sequence[Edge], *, height: float = 3.4) -> str:
    """Boxes where they are placed, and edges with their labels beside them."""
    with canvas(7.2, height) as (axes, output):
        axes.set_axis_off()
        for edge in edges:
            (x0, y0), (x1, y1) = ends = places[edge.source], places[edge.target]
            colour = SERIES[edge.series % len(SERIES)]
            axes.plot(*zip(*ends, strict=True), color=colour, linewidth=1.3 * edge.weight, zorder=1)
            length = math.hypot(x1 - x0, y1 - y0)
            beside = -LABEL_POINTS * (y1 - y0) / length, LABEL_POINTS * (x1 - x0) / length
            middle = (x0 + x1) / 2, (y0 + y1) / 2
            style: dict[str, Any] = {"ha": "center", "va": "center", "color": FAINT, "fontsize": 8}
            axes.annotate(edge.label, middle, beside, textcoords="offset points", **style)
        box: dict[str, Any] = {"boxstyle": "round,pad=0.5", "facecolor": GRID, "edgecolor": GRID}
        for name, at in places.items():
            axes.text(*at, name, ha="center", va="center", color=INK, fontsize=9, bbox=box)
        xs, ys = zip(*places.values(), strict=True)
        axes.set_xlim(min(xs) - 0.5, max(xs) + 0.5)
        axes.set_ylim(min(ys) - 0.35, max(ys) + 0.35)
    return output[0]
