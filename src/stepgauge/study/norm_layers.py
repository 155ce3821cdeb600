"""E5: norm layers, ours beside eager, compiled and LayerNorm."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.kernel_plots import kernel_plots
from stepgauge.report.kernels import kernel_table
from stepgauge.report.page import Block
from stepgauge.spec.grids import NORM_LAYERS
from stepgauge.spec.kernel import KernelSpec
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, Machine
from stepgauge.study.kernels import beside_published, kernel_specs, needs_gpu

WIDTHS = (1024, 2048, 4096, 8192)
# Seconds for 1000 passes are ms a pass.
_S1 = {
    "forward": {
        "eager": (0.66, 1.11, 2.18, 4.30),
        "layer_norm": (0.19, 0.32, 0.80, 1.65),
        "ours": (0.55, 0.36, 0.62, 1.16),
        "compile": (1.48, 0.98, 0.84, 1.58),
    },
    "both": {
        "eager": (0.97, 1.67, 3.25, 6.42),
        "layer_norm": (0.78, 1.00, 1.58, 2.81),
        "ours": (0.98, 1.07, 2.00, 4.00),
        "compile": (2.23, 1.01, 1.72, 2.97),
    },
}
PUBLISHED = {
    (("rows", 50_000), ("width", width), ("dtype", "fp32"), ("passes", passes)): {
        name: times[index] for name, times in rows.items()
    }
    for passes, rows in _S1.items()
    for index, width in enumerate(WIDTHS)
}


def specs(machine: Machine, folder: Path) -> Sequence[KernelSpec]:
    return kernel_specs(machine, "rms-norm", NORM_LAYERS)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    plots = kernel_plots(records, "width", by=("passes",))
    return [*plots, kernel_table(records), beside_published(records, "S1", PUBLISHED)]


EXPERIMENT = Experiment(
    name="norm-layers",
    title="Norm layers",
    question="What does RMSNorm cost as torch operations, compiled and fused, and what LayerNorm?",
    method=(
        "All implementations of a row run in one process, each checked against float64 first, then timed in turns "
        "over several rounds. Bytes count two tensors of the input's size in the forward, five in both passes."
    ),
    specs=specs,
    blocks=blocks,
    needs=needs_gpu,
)
