"""Experiment: data-parallel training, by wrapper and bucket size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.report.data_parallel import plots
from stepgauge.report.page import Block
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, StudyMachine, needs_two_gpus
from stepgauge.study.published import comparison
from stepgauge.study.sizes import S1_LOAD, sizes

BUCKETS_MB = (1.0, 5.0, 10.0, 50.0, 100.0, 500.0)
CPU_BUCKETS_MB = (0.05, 0.2, 0.5, 1.0, 5.0)
TRACED = ("naive", "overlapped")


def specs(machine: StudyMachine, folder: Path) -> Sequence[DataParallelSpec]:
    shown = [size for size in sizes(machine) if size != "10b"] if machine.is_gpu else ["tiny"]
    wrappers = [
        name for name, wrapper in WRAPPERS.items() if machine.is_gpu or not wrapper.is_torch
    ]
    rows = [_spec(machine, s, wrapper=w, trace=w in TRACED) for s in shown for w in wrappers]
    rows += [_spec(machine, size, wrapper="bucketed", reduce_dtype="bf16") for size in shown]
    buckets = BUCKETS_MB if machine.is_gpu else CPU_BUCKETS_MB
    rows += [_spec(machine, shown[-1], bucket_mb=mb) for mb in buckets]
    return list(dict.fromkeys(rows))


def _spec(machine: StudyMachine, size: str, **fields: Any) -> DataParallelSpec:
    batch, context = S1_LOAD if machine.is_gpu else (2, 64)
    model = ModelSpec.preset(size, context_length=context)
    counts = {"warmup": 5, "steps": 10} if machine.is_gpu else {"warmup": 2, "steps": 4}
    device = "cuda" if machine.is_gpu else "cpu"
    defaults = {**counts, "model": model, "size": size, "batch": batch, "device": device}
    return DataParallelSpec(**{**defaults, **fields}).canonical()


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    return [*plots(records), comparison("data-parallel", records, "S1 has 2 GPUs")]


def row_of(records: Sequence[Record], wrapper: str, size: str) -> Record | None:
    """Returns the first row of the wrapper and size."""
    return next(
        (r for r in records if (r.spec["wrapper"], r.spec["size"]) == (wrapper, size)), None
    )


EXPERIMENT = Experiment(
    name="data-parallel",
    title="Data parallel",
    question="How much slower is a step on two ranks, and how much of the communication is hidden?",
    method=(
        "Each rank is a process, and the slowest rank of each step counts. Exposed communication is "
        "the step's time minus that of the same step without collectives. The overlap ratio is the "
        "time in which a traced step both communicates and computes, divided by the time in which it "
        "communicates. Sent bytes are computed for ring algorithms, not measured."
    ),
    specs=specs,
    blocks=blocks,
    needs=needs_two_gpus,
    on_cpu="the two ranks are processes on one CPU: they share its cores and copy through memory",
)
