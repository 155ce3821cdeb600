"""What single operations take on a calibrated machine: looked up, or interpolated between shapes.

An operation's table becomes rates: work (operations or bytes, by formula) over time. Between the
shapes of the grid the rate is interpolated linearly in the logarithms of the sizes; outside, the
rate of the nearest shape holds, and the estimate says so.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import HardwareFile

CALIBRATED, INTERPOLATED, EXTRAPOLATED, ASSUMED = (
    "calibrated",
    "interpolated",
    "extrapolated",
    "assumed",
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Microseconds, and how they were found: one of the words above."""

    us: float
    source: str


class Machine:
    """A hardware file as a table of times. Raises ValueError where it has no calibration."""

    def __init__(self, hardware: HardwareFile):
        if not hardware.operations:
            raise ValueError(
                f"the hardware file {hardware.name} has no operations: run stepgauge calibrate "
                f"FILE on that machine"
            )
        self.hardware = hardware
        self._grids: dict[str, _Grid] = {}

    def time(self, operation: str, *sizes: float) -> Estimate:
        """The operation at the sizes of its table's axes. Raises ValueError for one that the file
        does not have.
        """
        if operation not in self._grids:
            table = self.hardware.operations.get(operation)
            if table is None:
                raise ValueError(
                    f"the hardware file {self.hardware.name} has no {operation!r}: run stepgauge "
                    f"calibrate again"
                )
            self._grids[operation] = _Grid(table, WORK[operation.partition(" ")[0]])
        return self._grids[operation].time(sizes)

    @functools.cached_property
    def _traffic(self) -> tuple[float, float]:
        """Microseconds of a launch, and bytes a microsecond, from the two largest sizes: smaller
        ones are the host's time, or stay in a cache.
        """
        *_, (size, us), (larger, longer) = sorted(self.hardware.operations["traffic"].rows)
        rate = (larger - size) / (longer - us)
        return max(1.0, us - size / rate), rate

    def traffic(self, nbytes: float) -> Estimate:
        """An elementwise operation that reads and writes so many bytes in all."""
        start, rate = self._traffic
        return Estimate(start + nbytes / rate, INTERPOLATED)


def _work_of_product(m: float, n: float, k: float) -> float:
    return 2 * m * n * k


def _work_of_attention(heads: float, length: float, width: float) -> float:
    return 2 * heads * length**2 * width


# Of an operation's first word: what its time grows with, by its sizes.
WORK: Mapping[str, Callable[..., float]] = {
    "matmul": _work_of_product,
    "attention": _work_of_attention,
    **dict.fromkeys(("rmsnorm", "layernorm", "cross-entropy"), lambda m, n: m * n),
    **dict.fromkeys(("cast", "optimizer", "traffic"), lambda size: size),
}


class _Grid:
    """Rates on a grid of sizes, in which some shapes may be missing."""

    def __init__(self, table: OperationTable, work: Callable[..., float]):
        self._work = work
        self._times = {tuple(sizes): us for *sizes, us in table.rows}
        points = list(self._times)
        self._axes = [sorted({point[axis] for point in points}) for axis in range(len(table.axes))]

    def time(self, sizes: Sequence[float]) -> Estimate:
        if tuple(sizes) in self._times:
            return Estimate(self._times[tuple(sizes)], CALIBRATED)
        inside = all(a[0] <= s <= a[-1] for a, s in zip(self._axes, sizes, strict=True))
        near = [_around(axis, size) for axis, size in zip(self._axes, sizes, strict=True)]
        total = weight = 0.0
        for corner in itertools.product(*near):
            point, share = tuple(size for size, _ in corner), math.prod(part for _, part in corner)
            us = self._times.get(point)
            if us is not None and share > 0:
                total += share * math.log(us / self._work(*point))
                weight += share
        if not weight:
            inside, total, weight = False, self._nearest(sizes), 1.0
        us = self._work(*sizes) * math.exp(total / weight)
        return Estimate(us, INTERPOLATED if inside else EXTRAPOLATED)

    def _nearest(self, sizes: Sequence[float]) -> float:
        """The logarithm of the time of a unit of work at the nearest shape there is."""

        def distance(point: Sequence[float]) -> float:
            return sum(math.log(p / s) ** 2 for p, s in zip(point, sizes, strict=True))

        point = min(self._times, key=distance)
        return math.log(self._times[point] / self._work(*point))


def _around(axis: Sequence[float], size: float) -> list[tuple[float, float]]:
    """The grid's sizes on both sides, each with its weight."""
    if size <= axis[0]:
        return [(axis[0], 1.0)]
    if size >= axis[-1]:
        return [(axis[-1], 1.0)]
    above = bisect.bisect_left(axis, size)
    low, high = axis[above - 1], axis[above]
    part = math.log(size / low) / math.log(high / low)
    return [(low, 1 - part), (high, part)]
