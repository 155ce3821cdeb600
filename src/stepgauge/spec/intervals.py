"""Sets of times, as sorted lists of disjoint (start, end)."""

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def merged(times: Iterable[tuple[float, float]]) -> Intervals:
    """Returns the union. Overlapping and touching intervals become one."""
    result: Intervals = []
    for start, end in sorted(times):
        if result and start <= result[-1][1]:
            if end > result[-1][1]:
                result[-1] = (result[-1][0], end)
        elif end > start:
            result.append((start, end))
    return result


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Returns the times that are in both sets, which must be merged."""
    result: Intervals = []
    left = right = 0
    while left < len(first) and right < len(second):
        start = max(first[left][0], second[right][0])
        end = min(first[left][1], second[right][1])
        if start < end:
            result.append((start, end))
        if first[left][1] < second[right][1]:
            left += 1
        else:
            right += 1
    return result


def total(times: Intervals) -> float:
    return sum(end - start for start, end in times)
