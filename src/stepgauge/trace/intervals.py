"""Sets of times as sorted lists of (start, end) that do not meet."""

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def merged(times: Iterable[tuple[float, float]]) -> Intervals:
    """The union: overlapping and touching intervals become one."""
    result: Intervals = []
    for start, end in sorted(times):
        if result and start <= result[-1][1]:
            if end > result[-1][1]:
                result[-1] = (result[-1][0], end)
        elif end > start:
            result.append((start, end))
    return result


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """What both contain; both must be merged."""
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
