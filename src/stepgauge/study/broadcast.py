"""E13: a host tensor to every GPU."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.broadcast import broadcast_blocks
from stepgauge.report.page import Block
from stepgauge.spec.broadcast import BLOCKLESS, SCHEDULES, BroadcastSpec
from stepgauge.spec.record import Record
from stepgauge.spec.units import MIB
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.published import beside

PUBLISHED_AT = "S3 does not state its tensor's size: compare each with the naive way"


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
    quickest = sorted(good, key=lambda record: record.median("time_ms") or 0.0)
    return [*broadcast_blocks(records), beside("broadcast", quickest, PUBLISHED_AT)]


EXPERIMENT = Experiment(
    name="broadcast",
    title="Host to every GPU",
    question="Which way of copying a tensor from the host to every GPU is the fastest?",
    method=(
        "Each schedule is a list of moves that one engine executes, in one process with streams, "
        "events and peer copies. Times are the host's clock from the first move to the end of the "
        "last, 16 repeats. The links alone are measured in the same run; the bound is what the "
        "busiest link needs for the bytes that the schedule gives it. Every byte is compared on "
        "every GPU."
    ),
    specs=specs,
    blocks=blocks,
    on_cpu="devices are parts of one memory here, and links are copies in it, one after another",
)
