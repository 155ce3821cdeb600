"""Experiment: bandwidth and time of collectives, by size."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.comm import comm_blocks
from stepgauge.report.page import Block
from stepgauge.spec.comm import CommSpec
from stepgauge.spec.record import Record
from stepgauge.spec.units import MIB
from stepgauge.study.experiment import Experiment, StudyMachine, needs_two_gpus
from stepgauge.study.published import comparison

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
_GPU_SIZES = tuple(round(mib * MIB) for mib in (0.5, 1, 2, 10, 25, 50, 100, 250, 500, 1024))
_CPU_SIZES = (MIB // 16, MIB // 4, MIB // 2, MIB, 4 * MIB, 10 * MIB)
_RANKS = (2, 4, 6, 8)


def specs(machine: StudyMachine, folder: Path) -> Sequence[CommSpec]:
    if not machine.is_gpu:
        operations = [(op, "library") for op in _OPS] + [("all_reduce", "ring")]
        return [
            CommSpec(op=op, algorithm=algorithm, size_bytes=size, seconds=0.1, warmup=2)
            for op, algorithm in operations
            for size in _CPU_SIZES
        ]
    rows = []
    for ranks in (n for n in _RANKS if n <= machine.gpus):
        rows += [_gpu_row("nccl", op, size, ranks) for op in _OPS for size in _GPU_SIZES]
        rows += [_gpu_row("gloo", "all_reduce", size, ranks) for size in _GPU_SIZES[:7]]
    return rows


def _gpu_row(backend: str, op: str, size: int, ranks: int) -> CommSpec:
    return CommSpec(
        op=op, backend=backend, size_bytes=size, ranks=ranks, seconds=0.1, device="cuda"
    )


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    return [*comm_blocks(records), comparison("collectives", records, "All-reduce")]


EXPERIMENT = Experiment(
    name="collectives",
    title="Collectives",
    question="How fast are the links between ranks, and how does the time of a collective grow with size?",
    method=(
        "Each rank is a process. Each operation is run on known values and every element of the "
        "result is checked, before and after the timing. Operations are enqueued in batches, without "
        "waiting between them. The time of a batch divided by its number of operations is one "
        "measurement, that of the slowest rank counts, and the median is shown. Bus bandwidth is "
        "defined as in nccl-tests. A third of the sizes is held out of the fit."
    ),
    specs=specs,
    blocks=blocks,
    needs=needs_two_gpus,
    on_cpu="Gloo connects two processes on one CPU, which says nothing about links between GPUs",
)
