"""The time of single operations on a calibrated machine, looked up or interpolated (grid.py)."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from stepgauge.cost.operations.terms import TRAFFIC
from stepgauge.cost.rates.alignment import with_alignment
from stepgauge.cost.rates.attention_time import attention_time
from stepgauge.cost.rates.estimate import (
    CALIBRATED,
    EXTRAPOLATED,
    INTERPOLATED,
    TRANSFERRED,
    Estimate,
)
from stepgauge.cost.rates.grid import FAR, WORK, Grid, grouped_flops
from stepgauge.cost.rates.network import Links
from stepgauge.cost.rates.peak_ratios import PeakRatios
from stepgauge.cost.rates.substitutes import FEW, Tables, reference_of, with_substitutes
from stepgauge.spec.calibration import (
    ALONE,
    BATCHED,
    EXACT,
    FULL_MASK,
    GROUPED,
    OPERATORS,
    OperationTable,
)
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import ULYSSES

PRODUCT_LAYOUTS = ("nt", "nn", "tn")
# Products and attention were calibrated alternating with passes over memory, each for half of the time.
CALIBRATED_PRODUCT_SHARE = 0.5
Requested = set[tuple[str, tuple[Any, ...]]]  # operations with their sizes


class CalibratedMachine:
    """The operations of a hardware file, and those that only its base has, scaled by the ratio of
    published peaks.

    Raises ValueError if neither has a calibration.

    requested  the set to which operations and sizes that are looked up are added; for OPERATORS, the
               calls. Copies at other product shares add to the same set
    """

    def __init__(self, hardware: HardwareFile, *, requested: Requested | None = None):
        own, base = with_substitutes(hardware.operations), hardware.base
        inherited = with_substitutes(_lacking(own, base.operations)) if base else {}
        if not own and not inherited:
            content = "links only" if hardware.links else "no operations"
            raise ValueError(
                f"the hardware file {hardware.name} has {content}: take one that was calibrated, or "
                f"run stepgauge calibrate FILE on that machine"
            )
        self.hardware = hardware
        # the file with most of the times: a file with a base may have the host's only
        self._calibrated = base if base and TRAFFIC in inherited else hardware
        self._product_share = CALIBRATED_PRODUCT_SHARE
        self.network = Links(hardware)
        self._operations = {**inherited, **own}
        self._grids: dict[str, Grid] = {}
        self.requested: Requested = set() if requested is None else requested
        is_other_device = base is not None and base.device != hardware.device
        self._scaled = inherited.keys() - own.keys() if is_other_device else set()
        self._ratios = PeakRatios(base, hardware) if base and self._scaled else None

    def at_product_share(self, share: float) -> "CalibratedMachine":
        """Returns the same machine, for a step in which products and attention take this share of the time.

        A GPU at its power limit runs them faster if the rest of the step draws less power.
        """
        other = copy.copy(self)  # with the same tables, grids and record of requests
        other._product_share = share
        return other

    @property
    def is_transferred(self) -> bool:
        """True if the times are another device's, scaled. Those of the host alone may be its own."""
        return TRAFFIC in self._scaled

    @property
    def disturbance(self) -> str:
        """What disturbed the calibration, as a note; "" if nothing did."""
        files = dict.fromkeys((self.hardware.disturbance, self._calibrated.disturbance))
        return "; ".join(filter(None, files))

    @property
    def operations(self) -> Collection[str]:
        """The names of the calibrated operations."""
        return self._operations.keys()

    def table(self, operation: str) -> OperationTable | None:
        """Returns the calibrated times of an operation; None if there are none."""
        return self._operations.get(operation)

    def _required_table(self, operation: str) -> OperationTable:
        if table := self.table(operation):
            return table
        kind, name, *_ = (*operation.split(), "")
        if kind == "attention" and name in FEW and operation.endswith("fp32"):
            raise ValueError(
                f"attention is {name!r}, which stepgauge calibrate times in bf16 only: choose a 16-bit "
                f"precision, or sdpa (with a context axis: {ULYSSES})"
            )
        raise ValueError(
            f"the hardware file {self._calibrated.name} has no {operation!r}: run stepgauge calibrate "
            f"again, without --only"
        )

    def time(self, operation: str, *sizes: float) -> Estimate:
        """Returns the time of an operation at the sizes of its table's axes.

        Raises ValueError if the file does not have the operation.
        """
        variant = next((word for word in (FULL_MASK, BATCHED, GROUPED) if word in operation), "")
        if variant and not self.knows(operation, sizes):
            return self._without_variant(operation.replace(variant, ""), variant, sizes)
        self.requested.add((operation, sizes))
        exact, aligned = self._exact(operation, sizes), with_alignment(operation, sizes)
        if self.table(aligned):
            operation = aligned
        estimate = exact or self._interpolated(operation, sizes)
        is_product = operation.startswith("matmul") and GROUPED not in operation
        is_outside = is_product and estimate.source == EXTRAPOLATED
        if without_passes := self.table(f"{operation} {ALONE}"):
            estimate = self._at_its_share(operation, sizes, estimate, without_passes)
        if operation.startswith("attention"):
            return self._at_least_traffic(estimate, _attention_bytes(operation, sizes))
        if is_outside:
            return self._at_least_traffic(estimate, _product_bytes(operation, sizes))
        return estimate

    def _interpolated(self, operation: str, sizes: tuple[float, ...]) -> Estimate:
        """Returns the time from the operation's table. If few shapes were timed and all are far, the same
        product in another layout may have been timed nearer.
        """
        table = self._required_table(operation)
        found = self._in_table(operation, table, sizes)
        if found.times_away <= FAR or not table.has_few or not operation.startswith("matmul"):
            return found
        kind, *layout, dtype = operation.split()
        others = [" ".join((kind, *layout[:-1], other, dtype)) for other in PRODUCT_LAYOUTS]
        tables = ((name, self.table(name)) for name in others)
        near = [self._in_table(name, other, sizes) for name, other in tables if other]
        return min((found, *near), key=lambda each: each.times_away)

    def _in_table(self, name: str, table: OperationTable, sizes: tuple[float, ...]) -> Estimate:
        """Returns the time by this operation's table, on this device."""
        return self._on_this_device(name, self._of_grid(name, table, sizes))

    def knows(self, operation: str, sizes: tuple[float, ...]) -> bool:
        """True if the file has times of the operation, or one at these sizes."""
        self.requested.add((operation, sizes))
        return self.table(operation) is not None or self._exact(operation, sizes) is not None

    def operator(self, call: str) -> Estimate | None:
        """Returns the time of a traced call; None if the call was not timed separately."""
        self.requested.add((OPERATORS, (call,)))
        dtype = "bf16" if "float16" in call else "tf32"
        like = f"matmul {dtype}" if call.startswith("convolution") else TRAFFIC
        return self._exact(OPERATORS, (call,), like=like)

    def traffic(self, nbytes: float) -> Estimate:
        """Returns the time of an elementwise operation that reads and writes `nbytes` in total."""
        launch_us, bytes_per_us = self._traffic
        us = launch_us + nbytes / bytes_per_us
        disturbed = self._required_table(TRAFFIC).disturbed
        return self._on_this_device(TRAFFIC, Estimate(us, INTERPOLATED, disturbed=disturbed))

    @functools.cached_property
    def _traffic(self) -> tuple[float, float]:
        """Fixed microseconds of a pass, and bytes per microsecond, from the two largest sizes.

        Smaller ones measure the host, or stay in a cache. Raises ValueError if they give no rate.
        """
        largest = sorted(self._required_table(TRAFFIC).rows)[-2:]
        (size, us), (larger, longer) = largest[0], largest[-1]
        if larger == size or longer <= us:
            raise ValueError(
                f"'traffic' of the hardware file {self._calibrated.name} gives no rate: it needs two "
                f"sizes, of which the larger takes longer; calibrate it with --only traffic --fresh on a "
                f"quiet machine"
            )
        bytes_per_us = (larger - size) / (longer - us)
        return max(1.0, us - size / bytes_per_us), bytes_per_us

    def _exact(self, operation: str, sizes: tuple[Any, ...], *, like: str = "") -> Estimate | None:
        """Returns a time that was measured for a step with exactly these sizes; None if there is none.

        like  the operation whose ratio of peaks counts, if it is another
        """
        name = f"{operation} {EXACT}"
        exact = self.table(name)
        if exact is None:
            return None
        us = next((us for *shape, us in exact.rows if tuple(shape) == sizes), None)
        if us is None:
            return None
        estimate = Estimate(us, CALIBRATED, disturbed=exact.disturbed)
        return self._on_this_device(name, estimate, like=like or operation)

    def _grid(self, name: str, table: OperationTable) -> Grid:
        if name not in self._grids:
            is_old_backward = "backward" in name and not table.captured
            self._grids[name] = Grid(table, self._work(name), may_be_launches=is_old_backward)
        return self._grids[name]

    def _of_grid(self, operation: str, table: OperationTable, sizes: tuple[float, ...]) -> Estimate:
        """Returns the time from the operation's own grid."""
        grid = self._grid(operation, table)
        is_own = operation.startswith("attention") and not reference_of(operation)
        if is_own and not self._calibrated.threads:  # on a CPU, there are no tiles to fill
            return attention_time(grid, *sizes)
        return grid.time(sizes)

    def _work(self, name: str) -> Callable[..., float]:
        """Returns what the time of an operation grows with, from its sizes.

        For attention of which few shapes were timed, it is the time of the attention with many.
        """
        reference = reference_of(name)
        if reference and (table := self.table(reference)):
            return lambda *sizes: self._of_grid(reference, table, sizes).us
        return grouped_flops if GROUPED in name else WORK[name.partition(" ")[0]]

    def _at_its_share(
        self,
        operation: str,
        sizes: Sequence[float],
        estimate: Estimate,
        without_passes: OperationTable,
    ) -> Estimate:
        """Returns the time of a product or of attention at the machine's product share.

        Some shapes were timed without passes as well, which is a product share of 1. The time at a share
        between is on the line through both. With fewer products than calibrated it is no shorter: the
        power limit hardly matters there.
        """
        name = f"{operation} {ALONE} too"
        if name not in self._grids:
            self._grid(name, self._required_table(operation).at(without_passes))
        alternating_us = self._grids[name].time(sizes).us
        alone_us = self._grid(f"{operation} {ALONE}", without_passes).time(sizes).us
        longer = alone_us / alternating_us - 1
        position = (self._product_share - CALIBRATED_PRODUCT_SHARE) / (1 - CALIBRATED_PRODUCT_SHARE)
        return estimate.scaled(1 + longer * max(0.0, position))

    def _without_variant(self, operation: str, variant: str, sizes: tuple[float, ...]) -> Estimate:
        """Returns the time of a variant that the file does not have, from the usual operation."""
        if variant == FULL_MASK:
            return self.time(operation, *sizes).scaled(2)  # causal attention has half of the pairs
        if variant == GROUPED:  # the first size is the number of experts, which share the rows
            whole = self.time(operation, *sizes[1:])
            return dataclasses.replace(whole, source=EXTRAPOLATED)
        # Batched: one product with the rows of all, but at least the bytes of all factors.
        batch, m, n, k = sizes
        whole = self.time(operation, batch * m, n, k)
        estimate = dataclasses.replace(whole, source=EXTRAPOLATED)
        return self._at_least_traffic(estimate, batch * _product_bytes(operation, (m, n, k)))

    def _at_least_traffic(self, estimate: Estimate, nbytes: float) -> Estimate:
        """Raises an estimate that was not measured to the time of moving its bytes."""
        traffic = self.traffic(nbytes)
        is_measured = estimate.source == CALIBRATED
        return traffic if traffic.us > estimate.us and not is_measured else estimate

    def _on_this_device(self, table: str, estimate: Estimate, *, like: str = "") -> Estimate:
        """Returns an estimate from a table, scaled if the table is another device's."""
        if self._ratios is None or table not in self._scaled:
            return estimate
        here = estimate.scaled(self._ratios.of(like or table))
        return dataclasses.replace(here, source=TRANSFERRED)


def _lacking(own: Tables, base: Tables) -> Tables:
    """Returns the base's tables of operations that the file itself does not have."""
    return {
        name: table
        for name, table in base.items()
        if name.removesuffix(f" {ALONE}").removesuffix(f" {EXACT}") not in own
    }


def _itemsize(operation: str) -> int:
    return 2 if operation.endswith("bf16") else 4


def _product_bytes(operation: str, sizes: Sequence[float]) -> float:
    """Returns the bytes of both factors and the result, for each of a batch."""
    *batch, m, n, k = sizes
    return _itemsize(operation) * math.prod(batch) * (m * k + k * n + m * n)


def _attention_bytes(operation: str, sizes: Sequence[float]) -> float:
    """Returns the bytes of q, k, v and the output; backward also has the gradient of each."""
    tensors = 4 if "forward" in operation else 8
    return tensors * _itemsize(operation) * math.prod(sizes)
