"""E5: norm layers, ours beside eager, compiled and LayerNorm."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.kernel_plots import kernel_plots
from stepgauge.report.kernels import kernel_table
from stepgauge.report.page import Block
from stepgauge.spec.grids import NORM_LAYERS
from stepgauge.spec.kernel import KernelSpec
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.published import beside
from stepgauge.study.sizes import kernel_specs, needs_gpu


def specs(machine: StudyMachine, folder: Path) -> Sequence[KernelSpec]:
    return kernel_specs(machine, "rms-norm", NORM_LAYERS)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    plots = kernel_plots(records, "width", by=("passes",))
    return [*plots, kernel_table(records), beside("norm-layers", records)]


EXPERIMENT = Experiment(
    name="norm-layers",
    title="Norm layers",
    question="What does RMSNorm cost as torch operations, compiled and fused, and what LayerNorm?",
    method=(
        "All implementations of a row run in one process, each checked against float64 first, then "
        "timed in turns over several rounds. Bytes count two tensors of the input's size in the "
        "forward, five in both passes."
    ),
    specs=specs,
    blocks=blocks,
    needs=needs_gpu,
)
