"""Measured sizes of one operation on a link, fitted by lines: the Link of spec/links.py."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stepgauge.spec.links import Link, Piece

# relative: what a median repeats to on an idle machine; a piece more must pay for itself beyond it
NOISE = 0.01
PENALTY = 9.0  # a piece has three parameters, each at the price of three times the squared noise
MOST_PIECES = 5
LEAST_POINTS = 3  # in a piece: two would be a line through both, whatever they are
HELD_OUT_EVERY = 3


class LinkPoint(NamedTuple):
    """A measured size. `noise` is what its time repeats to, relative: a size that repeats well
    counts for more.
    """

    bytes: int
    ms: float
    noise: float = NOISE


def split(points: Sequence[LinkPoint]) -> tuple[list[LinkPoint], list[LinkPoint]]:
    """Points to fit and points to hold out: every third by size, never the smallest or the largest.

    None is held out where fewer than LEAST_POINTS would be left to fit.
    """
    ordered = sorted(points)
    held_out = ordered[1:-1:HELD_OUT_EVERY]
    if len(ordered) - len(held_out) < LEAST_POINTS:
        held_out = []
    return [point for point in ordered if point not in held_out], held_out


def fit(points: Sequence[LinkPoint]) -> list[Piece]:
    """The line, or lines, of least squared error, each error in units of its point's noise.

    Breakpoints lie between two measured sizes (at their geometric mean). Among all ways to cut the
    sizes into up to MOST_PIECES runs of at least LEAST_POINTS, the one is taken that minimises
    sum((relative error / noise)²) + PENALTY·pieces; dynamic programming finds it. Raises ValueError
    for fewer than two sizes.
    """
    ordered = sorted(points)
    if len({point.bytes for point in ordered}) < 2:
        raise ValueError(f"a fit needs at least 2 sizes; there is {len(ordered)}")
    least = min(LEAST_POINTS, len(ordered))
    # best[k][end]: cost and cuts of the first `end` points in k pieces
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
    """Least squares with weights 1 / (ms·noise)²: relative errors count. Time never falls with
    size, and is never below zero where the piece holds.
    """
    points = [
        (1 / (point.ms * point.noise) ** 2, point.bytes, point.ms) for point in ordered[start:end]
    ]
    total = sum(weight for weight, _, _ in points)
    mean_size = sum(weight * size for weight, size, _ in points) / total
    mean_ms = sum(weight * ms for weight, _, ms in points) / total
    ms_per_byte = _slope([(weight, size - mean_size, ms - mean_ms) for weight, size, ms in points])
    ms_per_byte = max(ms_per_byte, 1e-15)  # flat: a petabyte a millisecond
    begin = (start and _between(ordered, start)) or 0
    if mean_ms < ms_per_byte * (mean_size - begin):  # below zero there: the best line from zero
        ms_per_byte = _slope([(weight, size - begin, ms) for weight, size, ms in points])
        return Piece(0.0 - ms_per_byte * begin, 1e3 / ms_per_byte)
    return Piece(mean_ms - ms_per_byte * mean_size, 1e3 / ms_per_byte)


def _slope(points: Sequence[tuple[float, float, float]]) -> float:
    """Of the best line through zero, of (weight, x, y); 0 where all x are."""
    squares = sum(weight * x**2 for weight, x, _ in points)
    return sum(weight * x * y for weight, x, y in points) / squares if squares else 0.0


def link(
    points: Sequence[LinkPoint],
    *,
    asked: Mapping[str, Any],
    measured: Mapping[str, Any],
    how: str = "",
) -> Link:
    """Fits two thirds of the sizes and tries the fit on the others. Raises ValueError for fewer
    than two sizes.
    """
    seen, unseen = split(points)
    pieces = fit(seen)
    bare = Link(
        asked=asked,
        pieces=pieces,
        range_bytes=(seen[0].bytes, seen[-1].bytes),
        fitted={},
        held_out={},
        measured=measured,
        how=how,
    )

    def errors(of: Sequence[LinkPoint]) -> dict[int, float]:
        return {point.bytes: bare.time_ms(point.bytes) / point.ms - 1 for point in of}

    return dataclasses.replace(bare, fitted=errors(seen), held_out=errors(unseen))
