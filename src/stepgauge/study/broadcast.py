"""Experiment: copying a host tensor to every GPU."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.broadcast import broadcast_blocks
from stepgauge.report.page import Block
from stepgauge.spec.broadcast import BLOCKLESS, SCHEDULES, BroadcastSpec
from stepgauge.spec.record import Record
from stepgauge.spec.units import MIB
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.published import comparison

PUBLISHED_NOTE = (
    "S3 does not state the size of its tensor: compare the times relative to the naive schedule"
)


def specs(machine: StudyMachine, folder: Path) -> Sequence[BroadcastSpec]:
    if not machine.is_gpu:
        return [BroadcastSpec(schedule=s, size_bytes=8 * MIB, block_bytes=MIB) for s in SCHEDULES]
    return [
        BroadcastSpec(schedule=s, block_bytes=block, gpus=machine.gpus, device="cuda")
        for s in SCHEDULES
        for block in ((32 * MIB,) if s in BLOCKLESS else (8 * MIB, 32 * MIB))
    ]


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    good = (record for record in records if record.status == "ok")
    fastest_first = sorted(good, key=lambda record: record.median("time_ms") or 0.0)
    return [*broadcast_blocks(records), comparison("broadcast", fastest_first, PUBLISHED_NOTE)]


EXPERIMENT = Experiment(
    name="broadcast",
    title="Host to every GPU",
    question="Which way of copying a tensor from the host to every GPU is the fastest?",
    method=(
        "Each schedule is a list of copies, which one process executes with streams, events and peer "
        "copies. Times are measured by the host's clock from the first copy to the end of the last, "
        "16 times. The links are measured separately in the same run. The bound is the time that the "
        "busiest link needs for its bytes. Every byte is checked on every GPU."
    ),
    specs=specs,
    blocks=blocks,
    on_cpu="the devices are regions of one memory and the links are copies within it, one at a time",
)
