"""AdamW in one launch over all parameters beside torch's."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.bench.kernels.grids import ADAMW_ANCHORS, product
from stepgauge.bench.sweep import Job
from stepgauge.report.kernel_plots import kernel_bars
from stepgauge.report.kernels import kernel_table
from stepgauge.report.page import Block
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, Machine
from stepgauge.study.kernels import kernel_jobs

ON_CPU = product(layers=(2,), width=(128,), dtype=("fp32",))


def jobs(machine: Machine, folder: Path) -> Sequence[Job]:
    return kernel_jobs(machine, "adamw", ADAMW_ANCHORS if machine.is_gpu else ON_CPU)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    return [*kernel_bars(records), kernel_table(records)]


EXPERIMENT = Experiment(
    name="optimizer",
    title="Optimizer step",
    question="How near does AdamW come to reading and writing its parameters, gradients and state once?",
    method=(
        "Gated Transformer blocks of nine tensors each, four widths to their feed-forward. 20 steps of each "
        "implementation are checked against float64, then steps are timed in turns in one process. Bytes a parameter: "
        "28 in fp32; in bf16 22 for ours, which keeps its state in fp32, and 14 for torch's, which keeps it in bf16. "
        "The ceiling is a copy in the same process."
    ),
    jobs=jobs,
    blocks=blocks,
)
