"""Experiment: memory of a step by category, and the effect of activation checkpointing."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepgauge.report.checkpointing import choice_of, memory_against_time
from stepgauge.report.memory import memory_blocks
from stepgauge.report.names import flatten
from stepgauge.report.page import Block
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.predictions import paired
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.fused_step import OUR_PARTS
from stepgauge.study.published import comparison
from stepgauge.study.sizes import S1_LOAD, S2_LOAD, sizes, step_spec

PUBLISHED_NOTE = (
    "S1's GB are taken as 10⁹ bytes, which it does not state. The model here has SwiGLU and so more "
    "parameters"
)
NO_PARTS: Mapping[str, str] = MappingProxyType({})
CHOICES = (("none", 1), ("blocks", 1), ("blocks", 2), ("nested", 2), ("selective", 1))
BEYOND = (("10b", 512), ("2.7b", 2048))


def specs(machine: StudyMachine, folder: Path) -> Sequence[Any]:
    """Memory by size, and memory and time of one size by kind of checkpointing."""
    from stepgauge.bench import memory

    load, chosen = (S1_LOAD, "small") if machine.is_gpu else (S2_LOAD, "mini")
    spec = functools.partial(_spec, machine)
    choices: list[dict[str, Any]] = [
        {"checkpointing": name, "checkpoint_blocks": k} for name, k in CHOICES
    ]
    rows = [spec(size, load, precision=p) for size in sizes(machine) for p in ("fp32", "bf16")]
    rows += [spec(chosen, load, **choice) for choice in choices[1:]]  # "none" is one of the sizes
    rows.append(spec(chosen, load, parts=OUR_PARTS, optimizer="fused"))
    if machine.has_compiler:
        rows.append(spec(chosen, load, compile="on"))
    if machine.is_gpu or machine.has_compiler:
        rows += [
            spec(size, (4, length), precision="bf16", predict="sm90") for size, length in BEYOND
        ]
    timed = [step_spec(machine, chosen, load=load, **choice) for choice in choices]
    # Jobs without the run's folder write no snapshots of the allocator.
    return [*(job for row in rows for job in memory.jobs(row)), *timed]


def _spec(
    machine: StudyMachine,
    size: str,
    load: tuple[int, int],
    *,
    parts: Mapping[str, str] = NO_PARTS,
    **fields: Any,
) -> MemorySpec:
    model = ModelSpec.preset(size, context_length=load[1], **parts)
    return MemorySpec(model=model, size=size, batch=load[0], device=machine.device, **fields)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    tracked = [record for record in records if record.kind == MemorySpec.kind]
    steps = [record for record in records if record.kind == StepSpec.kind]
    timed_sizes = {str(flatten(record.spec)["size"]) for record in steps}
    rows = [row.shown for row in paired(tracked)]
    measured = [record for record in rows if record.provenance == "measured"]
    variants = [
        record
        for record in rows
        if record.spec["size"] in timed_sizes and record.spec["precision"] == "fp32"
    ]
    largest = [record for record in measured if record not in variants][-1:]
    drawn = [*(record for record in variants if choice_of(record)[1] == 1), *largest]
    shown = [*memory_blocks(tracked, drawn=drawn, compared=variants)] if tracked else []
    points = _memory_and_time([record for record in variants if record in measured], steps)
    if points:
        shown.append(memory_against_time(points))
    return [*shown, comparison("memory", measured, PUBLISHED_NOTE)]


def _memory_and_time(
    tracked: Sequence[Record], steps: Sequence[Record]
) -> dict[str, tuple[float, float]]:
    """Returns ms of a step and bytes at its peak, by kind of checkpointing."""
    ms = {choice_of(step): step.median("step_ms") for step in steps if step.status == "ok"}
    points = {}
    for record in tracked:
        choice, k = choice_of(record)
        if (choice, k) in ms and _differs_only_in_checkpointing(record):
            name = choice if choice == "none" else f"{choice} {k}"
            points[name] = (ms[choice, k] or 0.0, record.median("peak_bytes") or 0.0)
    return points


def _differs_only_in_checkpointing(record: Record) -> bool:
    spec = flatten(record.spec)
    return spec["compile"] == "off" and spec["norm"] != OUR_PARTS["norm"]


EXPERIMENT = Experiment(
    name="memory",
    title="Memory",
    question="What holds memory during a step, what is the peak, and how much does checkpointing save?",
    method=(
        "Every storage is tracked from allocation to release. A gradient is the storage of a "
        "parameter's .grad, optimizer state is storage in the optimizer's state, an activation "
        "outlives the forward pass, and a temporary is everything else. On a GPU, sizes are from the "
        "history of the caching allocator, on a CPU they are those of the storages. The prediction "
        "is a separate record: the same step on tensors without memory, through a model of the "
        "allocator. 'Forward only' runs first, without gradients or optimizer state. For compiled "
        "code, what is kept for backward is what autograd's node holds; torch.compile's partitioner "
        "tells where it was made."
    ),
    specs=specs,
    blocks=blocks,
)
