"""A MemorySpec predicted and measured: two records of one spec, one modelled and one measured."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stepgauge.bench.build import check as check_step
from stepgauge.bench.build import least_bytes
from stepgauge.bench.checkpoint_budget import Solution, solve
from stepgauge.bench.storage_tracking import (
    FORWARD_ONLY,
    StepMemory,
    predict,
    step_memory,
    track_step,
)
from stepgauge.bench.sweep import Job
from stepgauge.measure import devices
from stepgauge.measure.environment import environment
from stepgauge.measure.memory import history
from stepgauge.measure.memory.missing_rules import NotPredictableError
from stepgauge.measure.memory.storage_tracker import StorageTracker
from stepgauge.measure.memory.timeline import LARGEST, MemoryTimeline, by_block, savers
from stepgauge.spec.memory import CATEGORIES, MemorySpec
from stepgauge.spec.plan.recompute import RecomputePlan
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import TRAINING_PHASES
from stepgauge.spec.user_model import UserModel

UNSEEN_PEAK = (
    "the peak is not seen: what compiled code holds while it runs can be tracked on CUDA only"
)
AT_THE_PEAK = "at_the_peak"


def check(spec: MemorySpec) -> None:
    """Raises ValueError for what the spec asks together but cannot have, before anything is built."""
    if spec.predict == "no":
        check_step(spec)
        if spec.compile != "off" and not spec.kept_is_told and not spec.device.startswith("cuda"):
            raise ValueError(
                f"checkpointing is {spec.checkpointing!r} around blocks that are compiled one by "
                "one; what is kept then can be tracked on CUDA only (compile the whole model: "
                "--compile on)"
            )


def jobs(spec: MemorySpec, *, folder: Path | None = None) -> list[Job]:
    """What gives the records of the spec: its prediction, then its measurement, where each can be."""
    process = Record.of(spec).key
    known = {
        "modelled": Job(predicted, spec, process, provenance="modelled"),
        "measured": Job(functools.partial(measure, folder=folder), spec, process),
    }
    return [known[provenance] for provenance in spec.provenances]


def predicted(spec: MemorySpec) -> Record:
    """The modelled record, made on tensors without memory. One that cannot be made has the status
    "failed" and names the operator.
    """
    check(spec)
    asked = dataclasses.replace(_asked(spec), provenance="modelled")
    try:
        solution = solve(spec)
        found = predict(spec, plan=solution.plan)
        asked = _with_solution(asked, solution)
    except NotPredictableError as error:
        return dataclasses.replace(asked, status="failed", note=str(error))
    note = "; ".join(filter(None, (asked.note, *found.left_out)))
    return _record(asked, found.step, _figures(found), note=note)


def measure(spec: MemorySpec, *, folder: Path | None = None) -> Record:
    """The measured record; the allocator's snapshot goes to the folder.

    Of a compiled step on a CPU the peak is not seen: its record has what backward keeps. Raises what
    torch raises where memory runs out.
    """
    check(spec)
    device, solution = torch.device(spec.device), solve(spec)
    asked, plan = _with_solution(_asked(spec), solution), solution.plan
    if device.type == "cuda":
        found, figures = _measured_by_allocator(spec, device, folder, plan)
        return _record(asked, found, figures)
    if device.type == "cpu" and not isinstance(spec.model, UserModel):
        devices.require_host_memory(least_bytes(spec))
    tracker = StorageTracker(device)
    with tracker if spec.compile == "off" else contextlib.nullcontext():
        track_step(spec, device, tracker, plan=plan)
    memory = step_memory(tracker, tracker.allocations, caching=False)
    resident = devices.peak_memory(device)
    if spec.compile == "off":
        return _record(asked, memory.step, _figures(memory) | resident)
    return _without_peak(asked, memory.step, resident)


def _with_solution(asked: Record, solution: Solution) -> Record:
    """The record with what was chosen for its budget."""
    environment = {**asked.environment, **solution.environment()}
    return dataclasses.replace(asked, environment=environment, note=solution.note)


def _asked(spec: MemorySpec) -> Record:
    return Record.of(
        spec,
        environment=environment(torch.device(spec.device)),
    )


def _measured_by_allocator(
    spec: MemorySpec, device: torch.device, folder: Path | None, plan: RecomputePlan | None
) -> tuple[MemoryTimeline, dict[str, float]]:
    """The last tracked step says whose bytes there are; the peaks are those of one more, which runs
    alone.

    Wants a process of its own, as every row has: what an earlier step has left, such as cuBLAS's
    workspaces, would be part of the level that its peaks are counted from.
    """
    first = history.event_count(device)
    baseline = torch.cuda.memory_allocated(device)
    tracker = StorageTracker(device, events=lambda: history.event_count(device))
    peaks: dict[str, float] = {}

    @contextlib.contextmanager
    def peak_of(name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(device)
        yield
        peaks[f"{_metric(name)}_peak_bytes"] = torch.cuda.max_memory_allocated(device) - baseline

    tracking = tracker if spec.compile == "off" else contextlib.nullcontext()
    with history.recording():
        with tracking:
            one_more = track_step(
                spec, device, tracker, around_forward_only=peak_of(FORWARD_ONLY), plan=plan
            )
        devices.synchronize(device)
        found = history.snapshot(device)
    one_more(peak_of)
    if folder is not None:
        history.save(found, snapshot_path(spec, folder))
    lives = history.joined(history.trace_of(found, device), tracker, first=first)
    shown = step_memory(tracker, lives, caching=True)
    peaks["peak_bytes"] = max(peaks[f"{name}_peak_bytes"] for name in TRAINING_PHASES)
    held = shown.step.peak.held
    parts = {f"{_metric(name)}_bytes": float(held[name]) for name in CATEGORIES}
    parts["unexplained_bytes"] = peaks["peak_bytes"] - sum(held.values())
    parts["reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device)
    return shown.step, {**peaks, **parts}


def snapshot_path(spec: MemorySpec, folder: Path) -> Path:
    """Where the allocator's snapshot of a row lies."""
    digest = hashlib.sha256(Record.of(spec).key.encode()).hexdigest()[:8]
    place = folder / "snapshots"
    place.mkdir(parents=True, exist_ok=True)
    length = getattr(spec.model, "context_length", "")  # a user's model may have none
    return place / f"{spec.size}-{spec.precision}-{length}-{digest}.pickle"


def _figures(found: StepMemory) -> dict[str, float]:
    shown = found.step
    peaks = {f"{_metric(phase.name)}_peak_bytes": shown.peak_of(phase) for phase in shown.phases}
    parts = {f"{_metric(name)}_bytes": shown.peak.held[name] for name in CATEGORIES}
    reserved = {"reserved_peak_bytes": shown.reserved} if shown.reserved else {}
    return {
        "peak_bytes": shown.peak.total,
        f"{_metric(FORWARD_ONLY)}_peak_bytes": found.forward_only_bytes,
        **peaks,
        **parts,
        **reserved,
    }


def _metric(name: str) -> str:
    return name.replace(" ", "_")


def _record(
    asked: Record, found: MemoryTimeline, figures: Mapping[str, float], **fields: Any
) -> Record:
    saved = found.saved_for_backward()
    blocks = by_block(saved, found.bytes_of)
    metrics = {name: Sample.exact(value, "bytes") for name, value in figures.items()}
    metrics["saved_for_backward_bytes"] = Sample.exact(sum(blocks.values()), "bytes")
    return dataclasses.replace(
        asked,
        metrics=metrics,
        series=_series(found),
        tables=_tables(found, blocks, saved),
        **fields,
    )


def _without_peak(asked: Record, found: MemoryTimeline, figures: Mapping[str, float]) -> Record:
    """The record of a step of which only what backward keeps is known."""
    known = _record(asked, found, figures, note=UNSEEN_PEAK)
    tables = {name: table for name, table in known.tables.items() if name != AT_THE_PEAK}
    return dataclasses.replace(known, series={}, tables=tables)


def _series(found: MemoryTimeline) -> dict[str, list[float]]:
    """The curve of each category over the step's events, and where its phases begin."""
    moments = found.thinned()
    start = found.phases[0].start
    series = {"event": [float(max(0, moment.event - start)) for moment in moments]}
    for name in CATEGORIES:
        series[_metric(name)] = [float(moment.held[name]) for moment in moments]
    series["phase_start"] = [float(phase.start - start) for phase in found.phases]
    return series


def _tables(
    found: MemoryTimeline, blocks: Mapping[str, int], saved: Sequence[Any]
) -> dict[str, list[list[Any]]]:
    return {
        AT_THE_PEAK: [
            ["category", "module", "made by", "line", "phase", "tensors", "bytes"],
            *([*row] for row in found.holders(found.peak.event)[:LARGEST]),
        ],
        "saved_by_block": [["block", "bytes"], *([name, size] for name, size in blocks.items())],
        "savers": [
            ["kept by", "made by", "line", "tensors", "bytes"],
            *([*row] for row in savers(saved, found.bytes_of)),
        ],
    }
