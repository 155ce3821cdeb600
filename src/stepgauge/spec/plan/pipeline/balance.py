"""How the parts of a network are cut into stages, so that no rank has more to do than the others."""

import itertools
from collections.abc import Iterator, Sequence


def balance(weights: Sequence[float], owners: Sequence[int]) -> list[int]:
    """How many consecutive parts each stage gets, at least one.

    The load of a rank is that of all its stages: in a V the last stage, which has the head, may be
    short because the first one on the same rank is. From equal stages on, borders move one or two
    at a time while the heaviest rank, then the spread over ranks and then over stages, gets
    smaller; more parts than there are stages make finer cuts.

    weights  of each part, in any unit
    owners   the rank of each stage

    Raises ValueError for fewer parts than stages.
    """
    stages = len(owners)
    if len(weights) < stages:
        raise ValueError(f"stages is {stages}; the network has {len(weights)} parts to cut")
    sums = [0.0, *itertools.accumulate(weights)]
    borders = equal_borders(len(weights), stages)
    best = _cost(borders, sums, owners)
    while True:
        cost, moved = min((_cost(tried, sums, owners), tried) for tried in moves(borders))
        if cost >= best:
            return [after - before for before, after in itertools.pairwise(borders)]
        best, borders = cost, moved


def equal_borders(parts: int, stages: int) -> tuple[int, ...]:
    """Between stages of as many parts, more or less."""
    return tuple(round(parts * n / stages) for n in range(stages + 1))


def _cost(
    borders: Sequence[int], sums: Sequence[float], owners: Sequence[int]
) -> tuple[float, ...]:
    """What to make small: the longest rank, then the squares of ranks, then those of stages."""
    stages = [sums[after] - sums[before] for before, after in itertools.pairwise(borders)]
    ranks = [0.0] * (max(owners) + 1)
    for owner, stage in zip(owners, stages, strict=True):
        ranks[owner] += stage
    return (round(max(ranks), 9), _squares(ranks), _squares(stages))


def _squares(loads: Sequence[float]) -> float:
    return round(sum(load * load for load in loads), 9)


def moves(borders: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The borders, and all that differ in one or two of the inner ones by one."""
    inner = range(1, len(borders) - 1)
    yield borders
    for first, second in itertools.product(inner, repeat=2):
        for a, b in itertools.product((-1, 0, 1), repeat=2):
            moved = list(borders)
            moved[first] += a
            moved[second] += b
            if all(x < y for x, y in itertools.pairwise(moved)):
                yield tuple(moved)
