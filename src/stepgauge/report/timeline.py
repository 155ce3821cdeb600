"""A step drawn over time: a lane a kind of work, the phases above. Colours are the page's CSS
variables.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.report.figure import short

WIDTH, LABEL, ROW, GAP, TOP, BOTTOM = 900, 120, 18, 5, 26, 34
COLOURS = 11  # of page.css
CHARACTER = 7  # wide, at most on average
Lanes = Mapping[str, Sequence[Sequence[float]]]


def timeline(
    lanes: Lanes, marks: Sequence[Sequence[Any]] = (), *, order: Sequence[str] = ()
) -> str:
    """SVG of lanes name -> [(start µs, end µs), ...]; `marks` are [name, start µs, end µs]; `order`
    from the top.

    A name of `order` has the same colour in every drawing.
    """
    names = [name for name in order if name in lanes] + [
        name for name in lanes if name not in order
    ]
    ends = [end for times in lanes.values() for _, end in times] + [mark[2] for mark in marks]
    length = max(ends, default=0.0) or 1.0
    height = TOP + len(names) * (ROW + GAP) + BOTTOM

    def x(us: float) -> float:
        return round(LABEL + us / length * (WIDTH - LABEL - 8), 2)

    parts = [*_marks(marks, x, height), *_axis(length, x, height)]
    colours = {
        name: number % COLOURS + 1 for number, name in enumerate(dict.fromkeys([*order, *names]))
    }
    for index, name in enumerate(names):
        parts += _lane(
            name, lanes[name], TOP + index * (ROW + GAP), f"var(--series-{colours[name]})", x
        )
    return f'<svg viewBox="0 0 {WIDTH} {height}" font-size="12" font-family="var(--sans)">{"".join(parts)}</svg>'


def _lane(
    name: str, times: Sequence[Sequence[float]], top: float, colour: str, x: Any
) -> list[str]:
    busy = sum(end - start for start, end in times) / 1e3
    boxes = "".join(f"M{x(a)} {top}H{max(x(b), x(a) + 0.4):.2f}v{ROW}H{x(a)}z" for a, b in times)
    return [
        f'<text x="{LABEL - 8}" y="{top + ROW - 5}" text-anchor="end" fill="var(--ink)">{html.escape(name)}</text>',
        f'<path d="{boxes}" style="fill:{colour}"><title>{html.escape(name)}: {short(busy)} ms</title></path>',
    ]


def _marks(marks: Sequence[Sequence[Any]], x: Any, height: float) -> list[str]:
    parts = []
    for name, start, end in marks:
        label = _fitting([f"{name} {short((end - start) / 1e3)} ms", str(name)], x(end) - x(start))
        parts.append(
            f'<path d="M{x(start)} 14V{height - BOTTOM}M{x(end)} 14V{height - BOTTOM}" stroke="var(--grid)"/>'
            f'<text x="{x(start) + 3}" y="12" fill="var(--faint)">{html.escape(label)}</text>'
        )
    return parts


def _fitting(texts: Sequence[str], room: float) -> str:
    """The first that the room holds; nothing where none does."""
    return next((text for text in texts if CHARACTER * len(text) <= room), "")


def _axis(length: float, x: Any, height: float) -> list[str]:
    line = height - BOTTOM + 4
    from matplotlib.ticker import MaxNLocator

    ticks = [us for us in MaxNLocator(6).tick_values(0, length) if us < length]
    return [f'<path d="M{LABEL} {line}H{WIDTH - 8}" stroke="var(--grid)"/>'] + [
        f'<text x="{x(us)}" y="{line + 16}" text-anchor="{"end" if us == ticks[-1] else "middle"}" fill="var(--faint)">'
        f"{short(us / 1e3)}{' ms' if us == ticks[-1] else ''}</text>"
        for us in ticks
    ]
