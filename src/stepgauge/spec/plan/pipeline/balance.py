"""Cuts the parts of a network into pipeline stages so that every rank has about the same load."""

import itertools
from collections.abc import Iterable, Iterator, Sequence


def balance(weights: Sequence[float], owners: Sequence[int]) -> list[int]:
    """Returns how many consecutive parts each stage gets, at least one.

    A rank's load is the sum over all its stages. In a V, for example, the last stage has the head,
    and the first stage of the same rank can be made shorter in exchange. The search starts from
    stages of equal length and moves borders by one part (see `moves`) for as long as that reduces, in
    this order: the load of the heaviest rank, the spread over ranks, the spread over stages.

    weights  load of each part, in any unit
    owners   the rank of each stage

    Raises ValueError if there are fewer parts than stages.
    """
    stages = len(owners)
    if len(weights) < stages:
        raise ValueError(f"stages is {stages}; the network has {len(weights)} parts to cut")
    sums = [0.0, *itertools.accumulate(weights)]
    borders = equal_borders(len(weights), stages)
    best = _imbalance(borders, sums, owners)
    while True:
        value, moved = min((_imbalance(tried, sums, owners), tried) for tried in moves(borders))
        if value >= best:
            return [after - before for before, after in itertools.pairwise(borders)]
        best, borders = value, moved


def equal_borders(parts: int, stages: int) -> tuple[int, ...]:
    """Borders that give every stage the same number of parts, up to rounding."""
    return tuple(round(parts * n / stages) for n in range(stages + 1))


def _imbalance(
    borders: Sequence[int], sums: Sequence[float], owners: Sequence[int]
) -> tuple[float, ...]:
    """The largest rank's load, then the sum of squares over ranks, then over stages."""
    stages = [sums[after] - sums[before] for before, after in itertools.pairwise(borders)]
    ranks = [0.0] * (max(owners) + 1)
    for owner, stage in zip(owners, stages, strict=True):
        ranks[owner] += stage
    return (round(max(ranks), 9), _squares(ranks), _squares(stages))


def _squares(loads: Sequence[float]) -> float:
    return round(sum(load * load for load in loads), 9)


def moves(borders: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the borders themselves, and all variants in which a run of neighbouring inner borders, or any
    two, are moved by one part. A run gives a part of one stage to another that is not next to it.
    """
    inner = range(1, len(borders) - 1)
    yield borders
    for first, last in itertools.combinations_with_replacement(inner, 2):
        for a in (-1, 1):
            yield from _moved(borders, [(border, a) for border in range(first, last + 1)])
    for pair in itertools.combinations(inner, 2):
        for directions in itertools.product((-1, 1), repeat=2):
            yield from _moved(borders, zip(pair, directions, strict=True))


def _moved(borders: tuple[int, ...], by: Iterable[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Yields the borders, each moved by so many parts, unless a stage would be left without any."""
    moved = list(borders)
    for border, parts in by:
        moved[border] += parts
    if all(x < y for x, y in itertools.pairwise(moved)):
        yield tuple(moved)
