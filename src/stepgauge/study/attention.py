"""Experiment: attention kernels, by sequence length and batch."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.kernel_plots import kernel_plots
from stepgauge.report.kernels import kernel_table
from stepgauge.report.page import Block
from stepgauge.spec.grids import ATTENTION_BATCH, ATTENTION_HEADS
from stepgauge.spec.kernel import KernelSpec
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.published import comparison
from stepgauge.study.sizes import kernel_specs, needs_gpu


def specs(machine: StudyMachine, folder: Path) -> Sequence[KernelSpec]:
    return kernel_specs(machine, "attention", [*ATTENTION_HEADS, *ATTENTION_BATCH])


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    plotted = [record for record in records if record.spec["width"] == 64]
    plots = kernel_plots(plotted, "sequence", by=("batch", "dtype", "passes"))
    return [*plots, kernel_table(records), comparison("attention", records)]


EXPERIMENT = Experiment(
    name="attention",
    title="Attention",
    question=(
        "From which sequence length on is attention without a stored score matrix faster, and when "
        "does attention with one run out of memory?"
    ),
    method=(
        "fa2, cudnn, efficient and math are the backends of torch's scaled_dot_product_attention. "
        "FLOPs: 4 B H T² D in forward, half of that if causal; backward counts 2.5 times forward. "
        "The table says which implementations ran out of memory."
    ),
    specs=specs,
    blocks=blocks,
    needs=needs_gpu,
)
