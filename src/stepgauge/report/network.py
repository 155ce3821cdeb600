"""Pictures of who is connected to whom: boxes and lines between them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from stepgauge.report.figure import FAINT, GRID, INK, SERIES, canvas

Place = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Edge:
    """A line from one box to another, with a head if something goes that way. Weight 1 is a usual line."""

    source: str
    target: str
    label: str = ""
    directed: bool = False
    weight: float = 1.0
    series: int = 0


def circle(names: Sequence[str]) -> dict[str, Place]:
    """The boxes around a circle, the first at the top, clockwise."""
    angles = [math.pi / 2 - 2 * math.pi * i / len(names) for i in range(len(names))]
    return {name: (math.cos(a), math.sin(a)) for name, a in zip(names, angles, strict=True)}


def rows(levels: Sequence[Sequence[str]]) -> dict[str, Place]:
    """The boxes in rows, the first row at the top, each centred."""
    widest = max(len(level) for level in levels)
    step = [2.0 * widest / max(1, len(level)) for level in levels]
    return {
        name: ((i + 0.5) * step[row] - widest, -1.5 * row)
        for row, level in enumerate(levels)
        for i, name in enumerate(level)
    }


def network(places: Mapping[str, Place], edges: Sequence[Edge], *, width: float = 4.2, height: float = 4.2) -> str:
    """The boxes where they are placed, and the edges. Edges both ways between two boxes are bent apart."""
    with canvas(width, height) as (axes, output):
        axes.set_axis_off()
        pairs = {(edge.source, edge.target) for edge in edges if edge.directed}
        for edge in edges:
            bend = 0.12 if (edge.target, edge.source) in pairs else 0.0
            _draw(axes, places[edge.source], places[edge.target], edge, bend)
        for name, (x, y) in places.items():
            box = {"boxstyle": "round,pad=0.5", "facecolor": GRID, "edgecolor": GRID}
            axes.text(x, y, name, ha="center", va="center", color=INK, fontsize=9, bbox=box, zorder=3)
        axes.margins(0.2)
    return output[0]


def _draw(axes: object, start: Place, end: Place, edge: Edge, bend: float) -> None:
    colour = SERIES[edge.series % len(SERIES)]
    axes.annotate(  # type: ignore[attr-defined]
        "",
        end,
        start,
        arrowprops={
            "arrowstyle": "-|>" if edge.directed else "-",
            "connectionstyle": f"arc3,rad={bend}",
            "color": colour,
            "linewidth": 1.3 * edge.weight,
            "shrinkA": 20,
            "shrinkB": 20,
        },
    )
    if edge.label:
        (x0, y0), (x1, y1) = start, end
        x, y = (x0 + x1) / 2 + bend * (y1 - y0) / 2, (y0 + y1) / 2 - bend * (x1 - x0) / 2
        axes.text(x, y, edge.label, ha="center", va="center", color=FAINT, fontsize=7.5)  # type: ignore[attr-defined]
