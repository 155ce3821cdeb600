"""How much computation and communication slow each other down while both run."""

import dataclasses
from collections.abc import Mapping

from stepgauge.cost.operations.terms import TRANSFER
from stepgauge.cost.rates.estimate import ASSUMED, CALIBRATED
from stepgauge.cost.rates.network import Axis
from stepgauge.spec.calibration import SHORT_PRODUCT_US, kernel_class
from stepgauge.spec.comm import COPIED
from stepgauge.spec.hardware import HardwareFile


@dataclasses.dataclass(frozen=True)
class Slowdown:
    """Time with overlap divided by time without, of a kernel and of a collective; at least 1."""

    kernel: float
    collective: float
    source: str


# Backward of 2.7b, 16 x 128, bf16 on 2 x H200 during NCCL's all-reduce: kernels lost 14.7 ms in
# 53.8 ms, and 45.4 ms of all-reduce took these 53.8 (2026-11-21-h200-data-parallel, rows naive and
# bucketed with a trace). Other rows give 1.25 to 1.38 and 1.18 to 1.49.
DEFAULT_SLOWDOWN = Slowdown(1.37, 1.18, ASSUMED)
# ZeRO's update of 2.7b and xl on 2 x H200, in four parts, each broadcast while the next is updated. U ms of
# updates and B ms of broadcasts alone took U/4 + B + k 3U/4 (1 - 1/s), or if the broadcasts were shorter,
# U + B/4 + 3B/4 s (1 - 1/k): 29.2, 17.3 and 19.1 ms for 14.6 + 18.5, 8.7 + 10.9 and 11.9 + 9.3
# (docs/log/2026-11-29-predictions-again.md). The update fills all multiprocessors and the memory's bandwidth.
UPDATE_SLOWDOWN = Slowdown(1.81, 1.55, ASSUMED)
# Kernels with as many blocks as fit on the multiprocessors, for as long as they run. Those of under 0.1 ms may
# leave some free, which is not modelled.
OCCUPYING = ("matmul", "attention")
# Keys that travel beside attention in a ring of two H200s (docs/log/2026-11-30-tensor-waits.md): attention took
# 1.2 times as long as without them, forward and backward, and 42 MB took 311 us instead of 160.
RING_SLOWDOWN = Slowdown(1.2, 1.9, ASSUMED)
# Copies by copy engines occupy no multiprocessors.
COPIES_SLOWDOWN = Slowdown(1.0, 1.0, ASSUMED)


class ContentionTable:
    """The contention table of a hardware file. For what it does not have, DEFAULT_SLOWDOWN,
    UPDATE_SLOWDOWN for the optimizer, RING_SLOWDOWN for messages from rank to rank, or COPIES_SLOWDOWN for
    collectives by copy engines.

    axes  by name; each has its own communicator
    """

    def __init__(self, hardware: HardwareFile, axes: Mapping[str, Axis]):
        self._hardware, self._axes = hardware, axes
        self._cache: dict[tuple[str, str, str], Slowdown] = {}

    def of(
        self, operation: str, collective: str, axis: str, us: float = SHORT_PRODUCT_US
    ) -> Slowdown:
        """Returns the slowdown of an operation that takes `us` and a collective on the axis."""
        key = kernel_class(operation, us), collective, axis
        if key not in self._cache:
            row = self._hardware.contention_of(operation, collective, self._axes[axis].ranks, us)
            self._cache[key] = (
                Slowdown(row.kernel_slowdown, row.collective_slowdown, CALIBRATED)
                if row
                else _default(key[0], collective)
            )
        return self._cache[key]

    def occupies(self, operation: str, collective: str) -> bool:
        """Returns True if the operation has all multiprocessors of a GPU, and the collective needs some."""
        is_on_gpu = not self._hardware.threads
        return is_on_gpu and operation.startswith(OCCUPYING) and not collective.startswith(COPIED)

    def share_links(self, axis: str, other: str) -> bool:
        """Returns True if both axes communicate within a node, or both between nodes."""
        return (self._axes[axis].nodes > 1) == (self._axes[other].nodes > 1)


def _default(kernels: str, collective: str) -> Slowdown:
    if collective.startswith(COPIED):
        return COPIES_SLOWDOWN
    if collective == TRANSFER:
        return RING_SLOWDOWN
    return UPDATE_SLOWDOWN if kernels == "update" else DEFAULT_SLOWDOWN
