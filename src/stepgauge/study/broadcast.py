"""E13: a host tensor to every GPU."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.bench.broadcast import job
from stepgauge.bench.sweep import Job
from stepgauge.report.broadcast import broadcast_blocks
from stepgauge.report.page import Block
from stepgauge.report.table import Table
from stepgauge.spec.broadcast import BLOCKLESS, SCHEDULES, BroadcastSpec
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, Machine
from stepgauge.study.published import SOURCES

_MIB = 1 << 20
# Seconds on 8 GPUs; the tensor's size is not stated, so ratios to the naive way are what compares.
_S3 = {"naive": 1.357, "pinned": 0.372, "staged": 0.075}


def jobs(machine: Machine, folder: Path) -> Sequence[Job]:
    if not machine.is_gpu:
        rows = [BroadcastSpec(schedule=s, size_bytes=8 * _MIB, block_bytes=_MIB) for s in SCHEDULES]
        return [job(spec) for spec in rows]
    return [
        job(BroadcastSpec(schedule=s, block_bytes=block, gpus=machine.gpus, device="cuda"))
        for s in SCHEDULES
        for block in ((32 * _MIB,) if s in BLOCKLESS else (8 * _MIB, 32 * _MIB))
    ]


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    return [*broadcast_blocks(records), _beside(records)]


def _beside(records: Sequence[Record]) -> Table:
    good = [record for record in records if record.status == "ok"]
    best: dict[str, float] = {}
    for record in good:
        time = record.metrics["time_ms"].median
        best[record.spec["schedule"]] = min(time, best.get(record.spec["schedule"], time))
    rows = [
        [
            schedule,
            1e3 * seconds,
            _S3["naive"] / seconds,
            best.get(schedule),
            best["naive"] / best[schedule] if {schedule, "naive"} <= set(best) else None,
            "S3",
        ]
        for schedule, seconds in _S3.items()
    ]
    head = [
        "schedule",
        "published ms",
        "published, × naive",
        "here ms",
        "here, × naive",
        "source",
    ]
    caption = f"Beside published figures. S3: {SOURCES['S3']}; its tensor's size is not stated."
    return Table(head, rows, numeric=frozenset(head[1:5]), caption=caption)


EXPERIMENT = Experiment(
    name="broadcast",
    title="Host to every GPU",
    question="Which way of copying a tensor from the host to every GPU is the fastest?",
    method=(
        "Each schedule is a list of moves that one engine executes: on GPUs in one process with streams, events and "
        "peer copies; elsewhere between processes, of which one is the host. Times are the host's clock from the first "
        "move to the end of the last, 16 repeats. The links alone are measured in the same run; the bound is what the "
        "busiest link needs for the bytes that the schedule gives it. Every byte is compared on every GPU."
    ),
    jobs=jobs,
    blocks=blocks,
    on_cpu="devices are processes of one CPU here, and links are copies through its memory",
)
