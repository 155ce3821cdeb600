"""Experiment: RMSNorm, ours compared with eager and compiled torch, and LayerNorm."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.kernel_plots import kernel_plots
from stepgauge.report.kernels import kernel_table
from stepgauge.report.page import Block
from stepgauge.spec.grids import NORM_LAYERS
from stepgauge.spec.kernel import KernelSpec
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.published import comparison
from stepgauge.study.sizes import kernel_specs, needs_gpu


def specs(machine: StudyMachine, folder: Path) -> Sequence[KernelSpec]:
    return kernel_specs(machine, "rms-norm", NORM_LAYERS)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    plots = kernel_plots(records, "width", by=("passes",))
    return [*plots, kernel_table(records), comparison("norm-layers", records)]


EXPERIMENT = Experiment(
    name="norm-layers",
    title="Norm layers",
    question="How long does RMSNorm take in eager torch, compiled and fused, and how long LayerNorm?",
    method=(
        "All implementations of a row run in one process. Each is checked against float64, then they "
        "are timed in turns over several rounds. Bytes count two tensors of the input's size in "
        "forward, and five in forward and backward."
    ),
    specs=specs,
    blocks=blocks,
    needs=needs_gpu,
)
