"""Experiment: step time by precision, the tensor types of a step, and rounding in sums."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepgauge.report.answers import choice_answer
from stepgauge.report.dtypes import EXPLANATION, accumulation_table, dtype_table
from stepgauge.report.names import flatten
from stepgauge.report.page import Block, Text
from stepgauge.report.step_plots import step_bars
from stepgauge.report.views import record_table
from stepgauge.spec.dtypes import AccumulationSpec, DtypesSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import PRECISIONS, StepSpec
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.published import SWIGLU, comparison
from stepgauge.study.sizes import S1_LOAD, sizes, step_spec


def specs(machine: StudyMachine, folder: Path) -> Sequence[Any]:
    model = ModelSpec.preset("nano")
    types = DtypesSpec(model=model, size="nano", precision="bf16", device=machine.device)
    return [*_timed(machine), types, AccumulationSpec(device=machine.device)]


def _timed(machine: StudyMachine) -> list[StepSpec]:
    if not machine.is_gpu:
        return [_spec(machine, "nano", p) for p in PRECISIONS if p != "tf32"]
    rows = [_spec(machine, size, p) for size in sizes(machine) for p in PRECISIONS]
    both = ("fp32", "bf16")
    return rows + [
        step_spec(machine, s, precision=p, load=S1_LOAD) for s in sizes(machine) for p in both
    ]


def _spec(machine: StudyMachine, size: str, precision: str) -> StepSpec:
    """Uses our optimizer for bf16-master, because only it keeps master weights."""
    optimizer = "fused" if precision == "bf16-master" else "adamw"
    return step_spec(machine, size, precision=precision, optimizer=optimizer)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    steps = [record for record in records if record.kind == StepSpec.kind]
    shown: list[Block] = _step_blocks(steps) if steps else []
    shown += [dtype_table(record) for record in records if "dtypes" in record.tables]
    sums = [accumulation_table(record) for record in records if "sums" in record.tables]
    return [*shown, *sums, *([Text(EXPLANATION)] if sums else [])]


def _step_blocks(records: Sequence[Record]) -> list[Block]:
    first = flatten(records[0].spec)
    same = [r for r in records if flatten(r.spec)["context_length"] == first["context_length"]]
    caption = (
        f"Step time by precision, batch × context {first['batch']} × {first['context_length']}."
    )
    return [
        step_bars(same, caption, row=_field("size"), bar=_field("precision"), bars=PRECISIONS),
        record_table(records),
        comparison("precision", [_with_total(record) for record in records], SWIGLU),
    ]


def _field(name: str) -> Callable[[Record], str]:
    return lambda record: str(record.spec[name])


def _with_total(record: Record) -> Record:
    """Adds the sum of forward and backward, which is what the sources published."""
    if record.status != "ok":
        return record
    total = (record.median("forward_ms") or 0.0) + (record.median("backward_ms") or 0.0)
    return dataclasses.replace(
        record, metrics={**record.metrics, "total_ms": Sample.exact(total, "ms")}
    )


EXPERIMENT = Experiment(
    name="precision",
    title="Precision",
    question=(
        "How much faster than fp32 are tf32, autocast to 16 bits and bf16 parameters, and where do "
        "they round?"
    ),
    method=(
        "fp32 does not allow tf32 matrix products; tf32 does, only on CUDA GPUs. bf16 and fp16 are "
        "autocast with fp32 parameters; fp16 uses loss scaling. bf16-pure keeps parameters and "
        "optimizer state in bf16. bf16-master has bf16 parameters and fp32 master weights in our "
        "fused optimizer. MFU is relative to the dense peak of the type in which the precision's "
        "matrix products run. A published total is forward plus backward."
    ),
    specs=specs,
    blocks=blocks,
    answer=lambda records: choice_answer(
        [record for record in records if record.kind == StepSpec.kind], "precision"
    ),
)
