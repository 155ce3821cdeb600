"""Pictures of who is connected to whom: boxes and lines between them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from stepgauge.report.figure import FAINT, GRID, INK, SERIES, canvas

Point = tuple[float, float]
_LABEL_POINTS = 9  # from a line to its label


@dataclasses.dataclass(frozen=True)
class Edge:
    """A line between two boxes, with a head if something goes that way. A usual weight is 1."""

    source: str
    target: str
    label: str = ""
    directed: bool = False
    weight: float = 1.0
    series: int = 0


def circle(names: Sequence[str]) -> dict[str, Point]:
    """The boxes around a circle, the first at the top, clockwise."""
    angles = [math.pi / 2 - 2 * math.pi * i / len(names) for i in range(len(names))]
    return {name: (math.cos(a), math.sin(a)) for name, a in zip(names, angles, strict=True)}


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
    """Boxes where they are placed, and edges; two edges between the same boxes are bent apart."""
    with canvas(7.2, height) as (axes, output):
        axes.set_axis_off()
        pairs = {(edge.source, edge.target) for edge in edges if edge.directed}
        for edge in edges:
            bend = 0.12 if (edge.target, edge.source) in pairs else 0.0
            _draw(axes, places[edge.source], places[edge.target], edge, bend)
        for name, (x, y) in places.items():
            box = {"boxstyle": "round,pad=0.5", "facecolor": GRID, "edgecolor": GRID}
            axes.text(
                x, y, name, ha="center", va="center", color=INK, fontsize=9, bbox=box, zorder=3
            )
        xs, ys = zip(*places.values(), strict=True)
        axes.set_xlim(min(xs) - 0.5, max(xs) + 0.5)
        axes.set_ylim(min(ys) - 0.35, max(ys) + 0.35)
    return output[0]


def _draw(axes: object, start: Point, end: Point, edge: Edge, bend: float) -> None:
    colour = SERIES[edge.series % len(SERIES)]
    axes.annotate(  # type: ignore[attr-defined]
        "",
        end,
        start,
        annotation_clip=False,
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
        middle = (x0 + x1) / 2 + bend * (y1 - y0) / 2, (y0 + y1) / 2 - bend * (x1 - x0) / 2
        length = math.hypot(x1 - x0, y1 - y0)
        beside = -_LABEL_POINTS * (y1 - y0) / length, _LABEL_POINTS * (x1 - x0) / length
        axes.annotate(  # type: ignore[attr-defined]
            edge.label,
            middle,
            beside,
            textcoords="offset points",
            ha="center",
            va="center",
            color=FAINT,
            fontsize=8,
        )
