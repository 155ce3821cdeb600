"""What experiments on single operations share: rows of a grid on this machine."""

from collections.abc import Iterable
from typing import Any

from stepgauge.report.kernel_plots import kernel_bars
from stepgauge.report.kernels import kernel_table
from stepgauge.spec.grids import Point
from stepgauge.spec.kernel import KERNELS, KernelSpec
from stepgauge.study.experiment import Experiment, Machine

SECONDS = 0.05  # of timing for each implementation: a grid has many rows


def kernel_specs(machine: Machine, kind: str, points: Iterable[Point]) -> list[KernelSpec]:
    """One row a point."""
    rows = ({"seconds": SECONDS, **point, "device": machine.device} for point in points)
    return [KERNELS[kind](**row) for row in rows]


def needs_gpu(machine: Machine) -> str | None:
    """Elsewhere plain PyTorch runs in place of our kernels, which measures nothing of them."""
    return None if machine.is_gpu else "our kernels run on CUDA GPUs only"


def kernel_experiment(kind: str, points: Iterable[Point], **told: Any) -> Experiment:
    """An operation beside its peers; `told` is what the experiment says of itself."""
    return Experiment(
        specs=lambda machine, folder: kernel_specs(machine, kind, points),
        blocks=lambda records: [*kernel_bars(records), kernel_table(records)],
        needs=needs_gpu,
        **told,
    )
