"""Fits lines to measured times of one operation on a link, for the Link of spec/links.py."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stepgauge.spec.links import Link, Piece

NOISE = 0.01  # relative; how well a median repeats on an idle machine
# Cost of a further piece, in squared noise: it has three parameters, and each must improve the fit by
# more than three times the squared noise.
PENALTY = 9.0
MOST_PIECES = 5
LEAST_POINTS = 3  # per piece; two points always fit a line
HELD_OUT_EVERY = 3


class LinkPoint(NamedTuple):
    """A measured size. A size with less relative `noise` counts for more."""

    bytes: int
    ms: float
    noise: float = NOISE


def split(points: Sequence[LinkPoint]) -> tuple[list[LinkPoint], list[LinkPoint]]:
    """Returns points to fit, and points to hold out: every third, but neither the smallest nor largest.

    Holds out none if fewer than LEAST_POINTS would be left to fit.
    """
    ordered = sorted(points)
    held_out = ordered[1:-1:HELD_OUT_EVERY]
    if len(ordered) - len(held_out) < LEAST_POINTS:
        held_out = []
    return [point for point in ordered if point not in held_out], held_out


def fit(points: Sequence[LinkPoint]) -> list[Piece]:
    """Returns the line, or several pieces, with the least squared error.

    The sizes are cut into up to MOST_PIECES runs of at least LEAST_POINTS such that
    sum((relative error / noise)²) + PENALTY·pieces is smallest, by dynamic programming. Breakpoints
    are the geometric means of two measured sizes. Raises ValueError for fewer than two sizes.
    """
    ordered = sorted(points)
    if len({point.bytes for point in ordered}) < 2:
        raise ValueError(f"a fit needs at least 2 sizes; there is {len(ordered)}")
    least = min(LEAST_POINTS, len(ordered))
    # best[k][end]: least cost of the first `end` points in k pieces, and where these end
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
    for _ in range(MOST_PIECES):
        row: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (cost, cuts) in best[-1].items():
            for end in range(start + least, len(ordered) + 1):
                total = cost + PENALTY + _cost(ordered, start, end)
                if end not in row or total < row[end][0]:
                    row[end] = total, (*cuts, end)
        best.append(row)
    _, cuts = min(row[len(ordered)] for row in best if len(ordered) in row)
    return [
        dataclasses.replace(_line(ordered, start, end), to_bytes=_between(ordered, end))
        for start, end in itertools.pairwise((0, *cuts))
    ]


def _between(ordered: Sequence[LinkPoint], end: int) -> int | None:
    """Returns the breakpoint after the first `end` points; None after the last."""
    if end == len(ordered):
        return None
    return round(math.sqrt(ordered[end - 1].bytes * ordered[end].bytes))


def _cost(ordered: Sequence[LinkPoint], start: int, end: int) -> float:
    line = _line(ordered, start, end)
    return sum(
        ((line.time_ms(point.bytes) - point.ms) / point.ms / point.noise) ** 2
        for point in ordered[start:end]
    )


def _line(ordered: Sequence[LinkPoint], start: int, end: int) -> Piece:
    """Returns the line of least squares with weights 1 / (ms·noise)², which makes errors relative.

    Time never falls with size, and is not negative within the piece.
    """
    points = [
        (1 / (point.ms * point.noise) ** 2, point.bytes, point.ms) for point in ordered[start:end]
    ]
    total = sum(weight for weight, _, _ in points)
    mean_size = sum(weight * size for weight, size, _ in points) / total
    mean_ms = sum(weight * ms for weight, _, ms in points) / total
    ms_per_byte = _slope([(weight, size - mean_size, ms - mean_ms) for weight, size, ms in points])
    ms_per_byte = max(ms_per_byte, 1e-15)  # a flat line: a petabyte per millisecond
    begin = (start and _between(ordered, start)) or 0
    if mean_ms < ms_per_byte * (mean_size - begin):  # negative there: the best line through zero
        ms_per_byte = _slope([(weight, size - begin, ms) for weight, size, ms in points])
        return Piece(0.0 - ms_per_byte * begin, 1e3 / ms_per_byte)
    return Piece(mean_ms - ms_per_byte * mean_size, 1e3 / ms_per_byte)


def _slope(points: Sequence[tuple[float, float, float]]) -> float:
    """Returns the slope of the best line through zero for (weight, x, y); 0 if all x are 0."""
    squares = sum(weight * x**2 for weight, x, _ in points)
    return sum(weight * x * y for weight, x, y in points) / squares if squares else 0.0


def link(
    points: Sequence[LinkPoint],
    *,
    settings: Mapping[str, Any],
    measured: Mapping[str, Any],
    how: str = "",
) -> Link:
    """Fits two thirds of the sizes and tests the fit on the others.

    Raises ValueError for fewer than two sizes.
    """
    fitted, held_out = split(points)
    bare = Link(
        settings=settings,
        pieces=fit(fitted),
        range_bytes=(fitted[0].bytes, fitted[-1].bytes),
        fitted={},
        held_out={},
        measured=measured,
        how=how,
    )

    def errors(of: Sequence[LinkPoint]) -> dict[int, float]:
        return {point.bytes: bare.fitted_ms(point.bytes) / point.ms - 1 for point in of}

    return dataclasses.replace(bare, fitted=errors(fitted), held_out=errors(held_out))
