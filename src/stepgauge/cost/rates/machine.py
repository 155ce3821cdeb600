"""What single operations take on a calibrated machine: looked up, or interpolated between shapes.

An operation's table becomes rates: work (operations or bytes, by formula) over time. Between the
shapes of the grid the rate is interpolated linearly in the logarithms of the sizes; outside, the
rate of the nearest shape holds, and the estimate says so.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from stepgauge.cost.rates.estimate import (
    CALIBRATED,
    EXTRAPOLATED,
    INTERPOLATED,
    TRANSFERRED,
    Estimate,
)
from stepgauge.cost.rates.network import Links
from stepgauge.spec.calibration import (
    ALONE,
    ASKED,
    BATCHED,
    FULL_MASK,
    GROUPED,
    OPERATORS,
    OperationTable,
)
from stepgauge.spec.hardware import HardwareFile, Peaks

# Of the time of a step: what products take where they were timed in turns with passes over memory.
HALF = 0.5


class CalibratedMachine:
    """A hardware file as a table of times: its own, or those of its base by the ratio of published
    peaks. Raises ValueError where neither has a calibration.

    products  their share of the time of the step that is priced. A GPU at its power limit runs
              them the faster, the more of the step draws less
    asked     which operations were asked for, at which sizes; of OPERATORS the calls
    """

    def __init__(self, hardware: HardwareFile, *, products: float = HALF):
        calibrated = hardware if hardware.operations else hardware.base
        if calibrated is None or not calibrated.operations:
            held = "links alone" if hardware.links else "no operations"
            raise ValueError(
                f"the hardware file {hardware.name} has {held}: take one that was calibrated, or run "
                f"stepgauge calibrate FILE on that machine"
            )
        self.hardware, self._calibrated, self._products = hardware, calibrated, products
        self.network = Links(hardware)
        self._grids: dict[str, _Grid] = {}
        self.asked: set[tuple[str, tuple[Any, ...]]] = set()
        is_base = calibrated is hardware.base and calibrated.device != hardware.device
        self._pace = _Pace(calibrated.peaks, hardware.peaks) if is_base else None

    def at(self, products: float) -> "CalibratedMachine":
        """The same where products have that share of the time."""
        other = CalibratedMachine(self.hardware, products=products)
        other._grids, other.asked = self._grids, self.asked
        return other

    def time(self, operation: str, *sizes: float) -> Estimate:
        """The operation at the sizes of its table's axes. Raises ValueError for one that the file
        does not have.
        """
        variant = next((word for word in (FULL_MASK, BATCHED, GROUPED) if word in operation), "")
        if variant and not self.knows(operation, sizes):
            return self._as_usual(operation.replace(variant, ""), variant, sizes)
        self.asked.add((operation, sizes))
        found = self._here(operation, self._looked_up(operation, sizes))
        if operation.startswith("attention"):
            return self._at_least(found, _bytes_of_attention(operation, sizes))
        alone = self.table(f"{operation} {ALONE}")
        paced = self._at_its_pace(operation, sizes, found, alone) if alone else found
        is_product = operation.startswith("matmul") and GROUPED not in operation
        if is_product and found.source == EXTRAPOLATED:
            return self._at_least(paced, _bytes_of_product(operation, sizes))
        return paced

    def knows(self, operation: str, sizes: tuple[float, ...]) -> bool:
        """Whether the file has times of the operation, or one at these sizes."""
        self.asked.add((operation, sizes))
        is_known = self.table(operation) is not None
        return is_known or self._exact_us(operation, sizes) is not None

    def operator(self, call: str) -> Estimate | None:
        """A traced call, where it was timed by itself."""
        self.asked.add((OPERATORS, (call,)))
        exact = self._exact_us(OPERATORS, (call,))
        if exact is None:
            return None
        dtype = "bf16" if "float16" in call else "tf32"
        like = f"matmul {dtype}" if call.startswith("convolution") else "traffic"
        return self._here(like, Estimate(exact, CALIBRATED))

    def _exact_us(self, operation: str, sizes: tuple[Any, ...]) -> float | None:
        """Timed for a step that has these very sizes."""
        exact = self.table(f"{operation} {ASKED}")
        rows = exact.rows if exact else ()
        return next((us for *shape, us in rows if tuple(shape) == sizes), None)

    def _looked_up(self, operation: str, sizes: tuple[float, ...]) -> Estimate:
        """Exact, or between the sizes of the grid."""
        exact = self._exact_us(operation, sizes)
        if exact is not None:
            return Estimate(exact, CALIBRATED)
        return self._grid(operation, self._known(operation)).time(sizes)

    def _at_its_pace(
        self, operation: str, sizes: Sequence[float], found: Estimate, alone: OperationTable
    ) -> Estimate:
        """A product was timed in turns with passes over memory, and some shapes alone, too: their
        share lies between, and the time on the line through both.
        """
        of_both = self._grid(f"{operation} {ALONE} too", self._known(operation).at(alone))
        alone_us = self._grid(f"{operation} {ALONE}", alone).time(sizes).us
        longer = alone_us / of_both.time(sizes).us - 1
        return Estimate(
            found.us * (1 + longer * (self._products - HALF) / (1 - HALF)), found.source
        )

    def _grid(self, name: str, table: OperationTable) -> "_Grid":
        if name not in self._grids:
            is_launched = "backward" in name and not table.captured
            work = _work_of_grouped if GROUPED in name else WORK[name.partition(" ")[0]]
            self._grids[name] = _Grid(table, work, is_launched=is_launched)
        return self._grids[name]

    @property
    def disturbance(self) -> str:
        """Of the file whose operations count."""
        return self._calibrated.disturbance

    @property
    def operations(self) -> Collection[str]:
        """The names of those that were calibrated."""
        return self._calibrated.operations.keys()

    def table(self, operation: str) -> OperationTable | None:
        """As calibrated."""
        return self._calibrated.operations.get(operation)

    def _known(self, operation: str) -> OperationTable:
        table = self.table(operation)
        if table is None:
            raise ValueError(
                f"the hardware file {self._calibrated.name} has no {operation!r}: run stepgauge "
                f"calibrate again, without --only"
            )
        return table

    def _as_usual(self, operation: str, variant: str, sizes: tuple[float, ...]) -> Estimate:
        """A variant that the file has no times of, from those of the usual operation."""
        if variant == FULL_MASK:
            causal = self.time(operation, *sizes)
            return Estimate(2 * causal.us, causal.source)  # which sees half of the pairs
        if variant == GROUPED:  # the first size is how many experts share the rows
            return Estimate(self.time(operation, *sizes[1:]).us, EXTRAPOLATED)
        batch, m, n, k = sizes  # as one product with all rows; each pair moves bytes of its own
        one = Estimate(self.time(operation, batch * m, n, k).us, EXTRAPOLATED)
        return self._at_least(one, batch * _bytes_of_product(operation, (m, n, k)))

    def _at_least(self, found: Estimate, nbytes: float) -> Estimate:
        """What was not timed takes no less than the passes over its bytes."""
        least = self.traffic(nbytes)
        return least if least.us > found.us and found.source != CALIBRATED else found

    def _here(self, operation: str, found: Estimate) -> Estimate:
        if self._pace is None:
            return found
        return Estimate(found.us * self._pace.of(operation), TRANSFERRED)

    @functools.cached_property
    def _traffic(self) -> tuple[float, float]:
        """Microseconds of a launch, and bytes a microsecond, from the two largest sizes: smaller
        ones are the host's time, or stay in a cache.
        """
        *_, (size, us), (larger, longer) = sorted(self._known("traffic").rows)
        rate = (larger - size) / (longer - us)
        return max(1.0, us - size / rate), rate

    def traffic(self, nbytes: float) -> Estimate:
        """An elementwise operation that reads and writes so many bytes in all."""
        start, rate = self._traffic
        return self._here("traffic", Estimate(start + nbytes / rate, INTERPOLATED))


class _Pace:
    """How much longer operations take on one device than on another, by their published peaks."""

    def __init__(self, base: Peaks | None, here: Peaks | None):
        if base is None or here is None:
            raise ValueError("a base needs published peaks of both devices, and one has none")
        self._flops = {kind: base.flops[kind] / here.flops[kind] for kind in here.flops}
        self._memory = base.memory_bytes_per_s / here.memory_bytes_per_s

    def of(self, operation: str) -> float:
        """Products and attention by arithmetic, all else by memory."""
        words = operation.split()
        is_product = words[0] in ("matmul", "attention")
        return self._flops[words[-1]] if is_product else self._memory


def _itemsize(operation: str) -> int:
    return 2 if operation.endswith("bf16") else 4


def _bytes_of_product(operation: str, sizes: Sequence[float]) -> float:
    """Of both factors and the result, of each of a batch."""
    *batch, m, n, k = sizes
    return _itemsize(operation) * math.prod(batch) * (m * k + k * n + m * n)


def _bytes_of_attention(operation: str, sizes: Sequence[float]) -> float:
    """Forward reads q, k and v and writes the output; backward has each of these and its gradient."""
    tensors = 4 if "forward" in operation else 8
    return tensors * _itemsize(operation) * math.prod(sizes)


def _work_of_product(*sizes: float) -> float:
    return 2 * math.prod(sizes)


def _work_of_grouped(experts: float, m: float, n: float, k: float) -> float:
    return 2 * m * n * k


def _work_of_attention(heads: float, length: float, width: float) -> float:
    return 2 * heads * length**2 * width


# Of an operation's first word: what its time grows with, by its sizes.
WORK: Mapping[str, Callable[..., float]] = {
    "matmul": _work_of_product,
    "attention": _work_of_attention,
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
    **dict.fromkeys(("cast", "optimizer", "traffic", "residual", "strided"), lambda size: size),
}


FLOOR_WORK_RATIO, FLOOR_US_RATIO = 4.0, 1.5


class _Grid:
    """Rates on a grid of sizes, in which some shapes may be missing.

    is_launched  short times may be the host's: older files have backward without CUDA graphs
    """

    def __init__(self, table: OperationTable, work: Callable[..., float], *, is_launched: bool):
        self._work = work
        self._times = {tuple(sizes): us for *sizes, us in table.rows}
        points = list(self._times)
        self._at_the_floor = self._points_at_the_floor()
        self._is_launched = is_launched
        self._axes = [sorted({point[axis] for point in points}) for axis in range(len(table.axes))]

    def time(self, sizes: Sequence[float]) -> Estimate:
        """As timed, else by the rates of the shapes around it, whose logarithms are interpolated."""
        asked = tuple(sizes)
        if asked in self._times and not self._is_the_hosts(asked, inside=True):
            return Estimate(self._times[asked], CALIBRATED)
        inside = all(a[0] <= s <= a[-1] for a, s in zip(self._axes, sizes, strict=True))
        shares = self._shares_around(sizes, inside=inside)
        if not shares:
            inside, shares = False, {self._nearest(sizes): 1.0}
        total = 0.0
        for point, share in shares.items():
            total += share * math.log(self._times[point] / self._work(*point))
        us = self._work(*sizes) * math.exp(total / sum(shares.values()))
        return Estimate(us, INTERPOLATED if inside else EXTRAPOLATED)

    def _shares_around(
        self, sizes: Sequence[float], *, inside: bool
    ) -> dict[tuple[float, ...], float]:
        """The corners of the grid's cell with these sizes that have a time of use, by their weight."""
        near = [_around(axis, size) for axis, size in zip(self._axes, sizes, strict=True)]
        shares = {}
        for corner in itertools.product(*near):
            point = tuple(size for size, _ in corner)
            share = math.prod(part for _, part in corner)
            has_time = point in self._times and not self._is_the_hosts(point, inside=inside)
            if has_time and share > 0:
                shares[point] = share
        return shares

    def _is_the_hosts(self, point: tuple[float, ...], *, inside: bool) -> bool:
        """Whether a time is to be left out: for shapes outside of the grid wherever it may be."""
        return point in self._at_the_floor and (self._is_launched or not inside)

    def _points_at_the_floor(self) -> set[tuple[float, ...]]:
        """Those for which several times their work takes hardly longer: such a time is the
        launch's, and says nothing about larger shapes.
        """
        ordered = sorted(self._times, key=lambda point: self._work(*point))
        works = [self._work(*point) for point in ordered]
        shortest = list(itertools.accumulate((self._times[p] for p in reversed(ordered)), min))
        found = set()
        for point, work in zip(ordered, works, strict=True):
            larger = len(works) - bisect.bisect_left(works, FLOOR_WORK_RATIO * work)
            if larger and shortest[larger - 1] < FLOOR_US_RATIO * self._times[point]:
                found.add(point)
        return found

    def _nearest(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """The nearest shape that there is a time of."""

        def distance(point: Sequence[float]) -> float:
            return sum(math.log(p / s) ** 2 for p, s in zip(point, sizes, strict=True))

        return min(set(self._times) - self._at_the_floor or self._times, key=distance)


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
