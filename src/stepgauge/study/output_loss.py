"""Output layer and cross-entropy in one operation that never holds the logits, beside those that do."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.bench.kernels.grids import LINEAR_CROSS_ENTROPY_ANCHORS, product
from stepgauge.bench.sweep import Job
from stepgauge.report.kernel_plots import kernel_bars
from stepgauge.report.kernels import kernel_table
from stepgauge.report.page import Block
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, Machine
from stepgauge.study.kernels import kernel_jobs

ON_CPU = product(
    tokens=(256,), width=(128,), vocabulary=(1000, 4000), dtype=("fp32",), passes=("both",), peers=("eager",)
)


def jobs(machine: Machine, folder: Path) -> Sequence[Job]:
    return kernel_jobs(machine, "linear-cross-entropy", LINEAR_CROSS_ENTROPY_ANCHORS if machine.is_gpu else ON_CPU)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    return [*kernel_bars(records), kernel_table(records)]


EXPERIMENT = Experiment(
    name="output-loss",
    title="Output layer and loss",
    question="What does it cost in time, and save in memory, never to hold the logits?",
    method=(
        "Loss and both gradients, each implementation checked against float64 first, then timed in turns in one "
        "process. FLOPs: 6 N D V, three products of N tokens, width D and V words. Extra memory, on a GPU, is the peak "
        "beyond inputs and results: logits of 16,384 tokens and 128,256 words are 3.9 GiB in bf16."
    ),
    jobs=jobs,
    blocks=blocks,
)
