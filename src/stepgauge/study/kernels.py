"""What experiments on single operations share: rows of a grid on this machine."""

from collections.abc import Iterable

from stepgauge.spec.grids import Point
from stepgauge.spec.kernel import KERNELS, KernelSpec
from stepgauge.study.experiment import Machine

SECONDS = 0.05  # of timing for each implementation: a grid has many rows


def kernel_specs(machine: Machine, kind: str, points: Iterable[Point]) -> list[KernelSpec]:
    """One row a point."""
    rows = ({"seconds": SECONDS, **point, "device": machine.device} for point in points)
    return [KERNELS[kind](**row) for row in rows]


def needs_gpu(machine: Machine) -> str | None:
    """Elsewhere plain PyTorch runs in place of our kernels, which measures nothing of them."""
    return None if machine.is_gpu else "our kernels run on CUDA GPUs only"
