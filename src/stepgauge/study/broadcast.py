"""E13: a host tensor to every GPU."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.broadcast import broadcast_blocks
from stepgauge.report.page import Block
from stepgauge.report.table import Table
from stepgauge.spec.broadcast import BLOCKLESS, SCHEDULES, BroadcastSpec
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, Machine
from stepgauge.study.published import beside_table

_MIB = 1 << 20
# Seconds on 8 GPUs; the tensor's size is not stated, so ratios to the naive way are what compares.
_S3 = {"naive": 1.357, "pinned": 0.372, "staged": 0.075}


def specs(machine: Machine, folder: Path) -> Sequence[BroadcastSpec]:
    if not machine.is_gpu:
        return [BroadcastSpec(schedule=s, size_bytes=8 * _MIB, block_bytes=_MIB) for s in SCHEDULES]
    return [
        BroadcastSpec(schedule=s, block_bytes=block, gpus=machine.gpus, device="cuda")
        for s in SCHEDULES
        for block in ((32 * _MIB,) if s in BLOCKLESS else (8 * _MIB, 32 * _MIB))
    ]


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    return [*broadcast_blocks(records), _beside(records)]


def _beside(records: Sequence[Record]) -> Table:
    best: dict[str, float] = {}
    for record in (record for record in records if record.status == "ok"):
        time, schedule = record.metrics["time_ms"].median, record.spec["schedule"]
        best[schedule] = min(time, best.get(schedule, time))
    rows = [
        {
            "schedule": schedule,
            "published ms": 1e3 * seconds,
            "published, × naive": _S3["naive"] / seconds,
            "here ms": best.get(schedule),
            "here, × naive": best["naive"] / best[schedule]
            if best.keys() >= {schedule, "naive"}
            else None,
            "source": "S3",
        }
        for schedule, seconds in _S3.items()
    ]
    return beside_table(rows, note="S3's tensor's size is not stated")


EXPERIMENT = Experiment(
    name="broadcast",
    title="Host to every GPU",
    question="Which way of copying a tensor from the host to every GPU is the fastest?",
    method=(
        "Each schedule is a list of moves that one engine executes, in one process with streams, events and "
        "peer copies. Times are the host's clock from the first "
        "move to the end of the last, 16 repeats. The links alone are measured in the same run; the bound is what the "
        "busiest link needs for the bytes that the schedule gives it. Every byte is compared on every GPU."
    ),
    specs=specs,
    blocks=blocks,
    on_cpu="devices are parts of one memory here, and links are copies in it, one after another",
)
