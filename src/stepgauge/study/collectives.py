"""E8: what the links between ranks give, by collective and size."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.comm import comm_blocks
from stepgauge.report.page import Block
from stepgauge.report.table import Table
from stepgauge.report.views import plotted
from stepgauge.spec.comm import CommSpec
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, Machine, needs_two_gpus
from stepgauge.study.published import beside_table

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
_MIB = 1 << 20
_GPU_SIZES = tuple(round(mib * _MIB) for mib in (0.5, 1, 2, 10, 25, 50, 100, 250, 500, 1024))
_CPU_SIZES = (_MIB // 16, _MIB // 4, _MIB // 2, _MIB, 4 * _MIB, 10 * _MIB)
_RANKS = (2, 4, 6, 8)

# All-reduce, ms by megabytes (10^6). S2 measured on A100s; its Gloo between processes of one host.
_S2: dict[tuple[str, int], dict[int, float]] = {
    ("nccl", 2): {1: 0.094, 10: 0.144, 100: 0.693, 1000: 5.62},
    ("nccl", 4): {1: 0.199, 10: 0.188, 100: 0.912, 1000: 7.42},
    ("nccl", 6): {1: 0.081, 10: 0.199, 100: 1.009, 1000: 8.34},
    ("gloo", 2): {1: 0.33, 10: 2.6, 100: 32, 1000: 310},
}


def specs(machine: Machine, folder: Path) -> Sequence[CommSpec]:
    if not machine.is_gpu:
        rows = [(op, "library") for op in _OPS] + [("all_reduce", "ring")]
        return [
            CommSpec(op=op, algorithm=algorithm, size_bytes=size, seconds=0.1, warmup=2)
            for op, algorithm in rows
            for size in _CPU_SIZES
        ]
    found = []
    for ranks in (n for n in _RANKS if n <= machine.gpus):
        found += [_gpu_row("nccl", op, size, ranks) for op in _OPS for size in _GPU_SIZES]
        found += [_gpu_row("gloo", "all_reduce", size, ranks) for size in _GPU_SIZES[:7]]
    return found


def _gpu_row(backend: str, op: str, size: int, ranks: int) -> CommSpec:
    return CommSpec(
        op=op, backend=backend, size_bytes=size, ranks=ranks, seconds=0.1, device="cuda"
    )


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    return [*comm_blocks(records), _beside(records)]


def _beside(records: Sequence[Record]) -> Table:
    """Published times and ours at the nearest size, with the bandwidth, which varies less by size."""
    rows = []
    for (backend, ranks), figures in _S2.items():
        asked = {"op": "all_reduce", "backend": backend, "ranks": ranks, "algorithm": "library", "timing": "pipelined",
                 "device": "cpu" if backend == "gloo" else "cuda"}  # fmt: skip
        ours = [
            r for r in records if r.status == "ok" and all(r.spec[k] == v for k, v in asked.items())
        ]
        for megabytes, ms in figures.items():
            spec = CommSpec(
                backend=backend, ranks=ranks, device="cuda", size_bytes=megabytes * 10**6
            )
            rows.append({
                "backend": backend, "ranks": ranks, "published size B": megabytes * 10**6,
                "published ms": ms, "published busbw GB/s": spec.bytes / ms / 1e6 * spec.factor,
                **_nearest(ours, spec.bytes), "source": "S2",
            })  # fmt: skip
    return beside_table(rows, here="here ms", note="All-reduce")


def _nearest(ours: Sequence[Record], size: int) -> dict[str, float | None]:
    """The row whose size is within a tenth."""
    near = [record for record in ours if abs(record.spec["size_bytes"] / size - 1) < 0.1][:1]
    figures = {"here ms": "time_ms", "here busbw GB/s": "busbw_gb_per_s"}
    found: dict[str, float | None] = {"here size B": near[0].spec["size_bytes"] if near else None}
    return found | {
        name: plotted(near[0], metric) if near else None for name, metric in figures.items()
    }


EXPERIMENT = Experiment(
    name="collectives",
    title="Collectives",
    question="What do the links between ranks give, and what does a byte cost?",
    method=(
        "A process a rank. Each operation is run on known values and every element is compared, before the timing and "
        "after it. Batches of operations are enqueued one after another; a batch's time over its number of operations "
        "is one value, the slowest rank's counts, the median is shown. Bus bandwidth as nccl-tests defines it. A third "
        "of the sizes is held out of the fit."
    ),
    specs=specs,
    blocks=blocks,
    needs=needs_two_gpus,
    on_cpu="Gloo between two processes of one CPU: it says nothing of links between GPUs",
)
