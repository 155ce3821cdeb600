"""Times of one operation over a grid of sizes, and interpolation between them.

Times become rates: work (FLOPs, bytes or values, by formula) over time. Between the grid's sizes, the
logarithm of the rate is interpolated linearly in the logarithms of the sizes. Outside of the grid, the
rate of the nearest size holds, and the estimate says so. In its holes, a corner that was not timed has the
rate of the nearest shape that was.
"""

import bisect
import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from stepgauge.cost.rates.estimate import CALIBRATED, EXTRAPOLATED, INTERPOLATED, Estimate
from stepgauge.spec.calibration import OperationTable


def _product_flops(*sizes: float) -> float:
    return 2 * math.prod(sizes)


def grouped_flops(experts: float, m: float, n: float, k: float) -> float:
    """Returns the FLOPs of grouped products. `m` counts the rows of all experts."""
    return 2 * m * n * k


def _attention_flops(heads: float, length: float, width: float) -> float:
    return 2 * heads * length**2 * width


# By an operation's first word: what its time grows with, from its sizes.
WORK: Mapping[str, Callable[..., float]] = {
    "matmul": _product_flops,
    "attention": _attention_flops,
    **dict.fromkeys(
        (
            "rmsnorm",
            "layernorm",
            "cross-entropy",
            "heads",
            "split",
            "gate",
            "gelu",
            "compiled",
            "embedding",
        ),
        lambda m, n: m * n,
    ),
    **dict.fromkeys(
        ("cast", "gradient", "optimizer", "traffic", "residual", "strided"), lambda size: size
    ),
}

# Work beyond this many times the nearest timed sizes has the best rate of all shapes: small shapes near the edge
# of a grid can be a hundred times as slow for their work as large ones.
FAR = 8.0

# A time is launch-bound if some shape with this many times the work takes less than this many times
# as long.
FLOOR_WORK_RATIO, FLOOR_US_RATIO = 4.0, 1.5


class Grid:
    """Rates on a grid of sizes, in which some shapes may be missing.

    axes             the timed sizes of each axis, in ascending order
    may_be_launches  short times may be launch overhead: in older files, backward was timed without
                     CUDA graphs
    """

    def __init__(self, table: OperationTable, work: Callable[..., float], *, may_be_launches: bool):
        self._work = work
        self._times = {tuple(sizes): us for *sizes, us in table.rows}
        self._disturbed = table.disturbed
        self._launch_bound = self._launch_bound_shapes()
        self._may_be_launches = may_be_launches
        self.axes = [
            sorted({shape[axis] for shape in self._times}) for axis in range(len(table.axes))
        ]
        self._estimates = functools.cache(self._estimate)  # layouts of a plan ask for equal sizes
        self._nearest = functools.cache(self._nearest_shape)

    def time(self, sizes: Sequence[float]) -> Estimate:
        """Returns the measured time, or one from the rates of the shapes around it."""
        return self._estimates(tuple(sizes))

    def _estimate(self, sizes: tuple[float, ...]) -> Estimate:
        if self._is_usable(sizes, inside=True):
            return Estimate(self._times[sizes], CALIBRATED, disturbed=self._disturbed)
        inside = all(a[0] <= s <= a[-1] for a, s in zip(self.axes, sizes, strict=True))
        weights, has_corner = self._weights_around(sizes, inside=inside)
        inside &= has_corner
        log_rate = 0.0
        for corner, weight in weights.items():
            log_rate += weight * math.log(self._times[corner] / self._work(*corner))
        us = self._work(*sizes) * math.exp(log_rate)
        if inside:
            return Estimate(us, INTERPOLATED, disturbed=self._disturbed)
        nearest = min(weights, key=lambda corner: _times_away(corner, sizes))
        away = _times_away(nearest, sizes)
        smaller = self._work(*sizes) < self._work(*nearest)
        if not smaller and away > FAR:  # continuous, so that more work never takes less time
            near = FAR / away
            us = near * us + (1 - near) * self._work(*sizes) * self._least_us_per_work
        within = tuple(min(s, axis[-1]) for s, axis in zip(sizes, self.axes, strict=True))
        if within != sizes:  # rates leave out launch-bound times, but larger shapes take no less
            us = max(us, self.time(within).us)
        return Estimate(
            us, EXTRAPOLATED, times_away=away, smaller=smaller, disturbed=self._disturbed
        )

    @functools.cached_property
    def _least_us_per_work(self) -> float:
        """The time per work of the shape with the best rate."""
        return min(us / self._work(*shape) for shape, us in self._times.items())

    def _weights_around(
        self, sizes: Sequence[float], *, inside: bool
    ) -> tuple[dict[tuple[float, ...], float], bool]:
        """Returns shapes with their weights, and whether any of them is a corner of the cell around the sizes.

        The nearest usable shape takes the place of a corner without a usable time. So the rate changes
        gradually: if such corners were left out, it would jump where one of them gets a weight.
        """
        weights: dict[tuple[float, ...], float] = collections.defaultdict(float)
        has_corner = False
        for corner, weight in self._corners(sizes):
            is_usable = self._is_usable(corner, inside=inside)
            weights[corner if is_usable else self._nearest(corner)] += weight
            has_corner |= is_usable
        return weights, has_corner

    def _corners(self, sizes: Sequence[float]) -> Iterator[tuple[tuple[float, ...], float]]:
        """Yields the corners of the grid cell around the sizes that have a weight, and the weight."""
        neighbours = [_neighbours(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        for corner in itertools.product(*neighbours):
            if weight := math.prod(part for _, part in corner):
                yield tuple(size for size, _ in corner), weight

    def _is_usable(self, shape: tuple[float, ...], *, inside: bool) -> bool:
        """False without a time, and for a launch-bound one that is used outside of the grid or may be
        overhead.
        """
        if shape in self._launch_bound:
            return inside and not self._may_be_launches
        return shape in self._times

    def _launch_bound_shapes(self) -> set[tuple[float, ...]]:
        """Returns the shapes for which several times the work takes hardly longer.

        Their times are launch latency and say nothing about larger shapes.
        """
        ordered = sorted(self._times, key=lambda shape: self._work(*shape))
        works = [self._work(*shape) for shape in ordered]
        # shortest[n]: the shortest time among the n + 1 shapes with the most work
        shortest = list(itertools.accumulate((self._times[s] for s in reversed(ordered)), min))
        launch_bound = set()
        for shape, work in zip(ordered, works, strict=True):
            larger = len(works) - bisect.bisect_left(works, FLOOR_WORK_RATIO * work)
            if larger and shortest[larger - 1] < FLOOR_US_RATIO * self._times[shape]:
                launch_bound.add(shape)
        return launch_bound

    def _nearest_shape(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Returns the nearest shape by the logarithms of its sizes, one that is not launch-bound if there is
        any.
        """
        shapes, logarithms = self._candidates
        distances = map(math.dist, logarithms, itertools.repeat(_logarithms(sizes)))
        return min(zip(distances, shapes, strict=False))[1]

    @functools.cached_property
    def _candidates(self) -> tuple[Sequence[tuple[float, ...]], Sequence[Sequence[float]]]:
        """The shapes that `_nearest_shape` chooses from, and the logarithms of their sizes."""
        usable = [shape for shape in self._times if shape not in self._launch_bound]
        shapes = usable or list(self._times)
        return shapes, [_logarithms(shape) for shape in shapes]


def _logarithms(sizes: Iterable[float]) -> list[float]:
    return [math.log(size) for size in sizes]


def _times_away(shape: Sequence[float], sizes: Sequence[float]) -> float:
    """Returns how many times as large or as small the sizes are, multiplied over all of them."""
    return math.prod(max(s / p, p / s) for p, s in zip(shape, sizes, strict=True))


def _neighbours(axis: Sequence[float], size: float) -> list[tuple[float, float]]:
    """Returns the grid's sizes on both sides of a size, each with its weight."""
    if size <= axis[0]:
        return [(axis[0], 1.0)]
    if size >= axis[-1]:
        return [(axis[-1], 1.0)]
    above = bisect.bisect_left(axis, size)
    low, high = axis[above - 1], axis[above]
    part = math.log(size / low) / math.log(high / low)
    return [(low, 1 - part), (high, part)]
