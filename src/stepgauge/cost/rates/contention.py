"""What computing and communication cost each other while both run: of each, its time beside the
other over its time alone.
"""

import dataclasses
import math
from collections.abc import Mapping

from stepgauge.cost.rates.estimate import ASSUMED, CALIBRATED
from stepgauge.spec.calibration import kernel_class
from stepgauge.spec.hardware import HardwareFile


@dataclasses.dataclass(frozen=True)
class Slowdown:
    """Factors, at least 1, and how they were found."""

    kernel: float
    collective: float
    source: str


# Backward of 2.7b, 16 x 128, bf16 on 2 x H200 beside NCCL's all-reduce: kernels lost 14.7 ms in
# 53.8 ms, and 45.4 ms of all-reduce took these 53.8 (2026-11-21-h200-data-parallel, rows naive and
# bucketed with a trace). Other rows give 1.25 to 1.38 and 1.18 to 1.49.
USUAL = Slowdown(1.37, 1.18, ASSUMED)


class ContentionTable:
    """The contention table of a hardware file; USUAL where it says nothing.

    ranks  of each axis, whose communicator is a stream of that name
    """

    def __init__(self, hardware: HardwareFile, ranks: Mapping[str, int]):
        self._hardware, self._ranks = hardware, ranks
        self._known: dict[tuple[str, str, str], Slowdown] = {}

    def of(self, operation: str, collective: str, axis: str, us: float = math.inf) -> Slowdown:
        key = kernel_class(operation, us), collective, axis
        if key not in self._known:
            row = self._hardware.contention_of(operation, collective, self._ranks[axis], us)
            self._known[key] = (
                Slowdown(row.kernel_slowdown, row.collective_slowdown, CALIBRATED) if row else USUAL
            )
        return self._known[key]


class NoContention:
    """Computing and communication that do not meet: by copy engines, or to ask what contention costs."""

    def of(self, operation: str, collective: str, axis: str, us: float = math.inf) -> Slowdown:
        return Slowdown(1.0, 1.0, ASSUMED)
