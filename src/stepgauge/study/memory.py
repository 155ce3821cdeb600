"""E4: who holds memory, and what activation checkpointing gives back for how much time."""

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
from stepgauge.study.published import beside
from stepgauge.study.sizes import S1, S2, sizes, step_spec

PUBLISHED_AT = (
    "S1's GB are taken as 10⁹ bytes, which it does not say. Ours has SwiGLU, so more parameters"
)
NO_PARTS: Mapping[str, str] = MappingProxyType({})
CHOICES = (("none", 1), ("blocks", 1), ("blocks", 2), ("nested", 2), ("selective", 1))
BEYOND = (("10b", 512), ("2.7b", 2048))


def specs(machine: StudyMachine, folder: Path) -> Sequence[Any]:
    """Memory by size, and of one size by checkpointing, which is timed too."""
    from stepgauge.bench import memory

    load, chosen = (S1, "small") if machine.is_gpu else (S2, "mini")
    spec = functools.partial(_spec, machine)
    choices: list[dict[str, Any]] = [
        {"checkpointing": name, "checkpoint_blocks": k} for name, k in CHOICES
    ]
    rows = [spec(size, load, precision=p) for size in sizes(machine) for p in ("fp32", "bf16")]
    rows += [spec(chosen, load, **choice) for choice in choices[1:]]  # none is among the sizes
    rows.append(spec(chosen, load, parts=OUR_PARTS, optimizer="fused"))
    if machine.has_compiler:
        rows.append(spec(chosen, load, compile="on"))
    if machine.is_gpu or machine.has_compiler:
        rows += [
            spec(size, (4, length), precision="bf16", predict="sm90") for size, length in BEYOND
        ]
    timed = [step_spec(machine, chosen, load=load, **choice) for choice in choices]
    # without the run's folder, to which snapshots of the allocator would go
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
    return [*shown, beside("memory", measured, PUBLISHED_AT)]


def _memory_and_time(
    tracked: Sequence[Record], steps: Sequence[Record]
) -> dict[str, tuple[float, float]]:
    """ms of a step and bytes at its peak, by the way of checkpointing."""
    ms = {choice_of(step): step.median("step_ms") for step in steps if step.status == "ok"}
    points = {}
    for record in tracked:
        choice = choice_of(record)
        if choice in ms and _is_stock(record):
            points[_words(*choice)] = (ms[choice] or 0.0, record.median("peak_bytes") or 0.0)
    return points


def _words(checkpointing: str, blocks_a_part: int) -> str:
    return checkpointing if checkpointing == "none" else f"{checkpointing} {blocks_a_part}"


def _is_stock(record: Record) -> bool:
    """Whether nothing but its checkpointing may set the row apart."""
    spec = flatten(record.spec)
    return spec["compile"] == "off" and spec["norm"] != OUR_PARTS["norm"]


EXPERIMENT = Experiment(
    name="memory",
    title="Memory",
    question="Who holds memory when in a step, what is its peak, and what does computing again give back?",
    method=(
        "Every storage is tracked from birth to death; a gradient is what a parameter's grad "
        "holds, optimizer state what the optimizer's state holds, an activation what outlives the "
        "forward pass, a temporary the rest. On a GPU the bytes are those of the caching "
        "allocator's own history, on a CPU those of the storages. The prediction is a record of "
        "its own: the same step on tensors without memory, through a model of the allocator. "
        "Forward only is the first thing that runs, without gradients or optimizer state. What "
        "compiled code keeps is what autograd's node holds, and where it was made is known from "
        "torch.compile's partitioner."
    ),
    specs=specs,
    blocks=blocks,
)
