"""Predicts and measures the memory of a step: two records of one MemorySpec, modelled and measured."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stepgauge.bench.build import check as check_step
from stepgauge.bench.checkpoint_budget import Solution, solve
from stepgauge.bench.host_memory import require_memory
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

UNSEEN_PEAK = (
    "the peak is not seen: memory that compiled code holds while it runs is tracked on CUDA only"
)
AT_THE_PEAK = "at_the_peak"


def check(spec: MemorySpec) -> None:
    """Raises ValueError if the spec's values cannot be combined; builds nothing."""
    if spec.predict == "no":
        check_step(spec)
        if spec.compile != "off" and not spec.kept_is_known and not spec.device.startswith("cuda"):
            raise ValueError(
                f"checkpointing is {spec.checkpointing!r} around separately compiled blocks, whose "
                "memory can be tracked on CUDA only (compile the whole model: --compile on)"
            )


def jobs(spec: MemorySpec, *, folder: Path | None = None) -> list[Job]:
    """Returns the jobs that predict and measure the spec, as far as it allows each."""
    process = Record.of(spec).key
    by_provenance = {
        "modelled": Job(predicted, spec, process, provenance="modelled"),
        "measured": Job(functools.partial(measure, folder=folder), spec, process),
    }
    return [by_provenance[provenance] for provenance in spec.provenances]


def predicted(spec: MemorySpec) -> Record:
    """Returns the modelled record, from a run on fake tensors. If the step runs an operator that
    cannot be predicted, the record has status "failed" and a note that names it.
    """
    check(spec)
    pending = dataclasses.replace(_pending(spec), provenance="modelled")
    try:
        solution = solve(spec)
        memory = predict(spec, plan=solution.plan)
        pending = _with_solution(pending, solution)
    except NotPredictableError as error:
        return dataclasses.replace(pending, status="failed", note=str(error))
    note = "; ".join(filter(None, (pending.note, *memory.left_out)))
    return _record(pending, memory.step, _figures(memory), note=note)


def measure(spec: MemorySpec, *, folder: Path | None = None) -> Record:
    """Returns the measured record, and saves the CUDA allocator's snapshot in the folder.

    For a compiled step on a CPU the peak cannot be measured; its record has only the memory that is
    kept for backward. Raises torch's errors if memory runs out.
    """
    check(spec)
    device, solution = torch.device(spec.device), solve(spec)
    pending, plan = _with_solution(_pending(spec), solution), solution.plan
    if device.type == "cuda":
        timeline, figures = _measured_by_allocator(spec, device, folder, plan)
        return _record(pending, timeline, figures)
    require_memory(spec)
    tracker = StorageTracker(device)
    with tracker if spec.compile == "off" else contextlib.nullcontext():
        track_step(spec, device, tracker, plan=plan)
    memory = step_memory(tracker, tracker.allocations, caching=False)
    resident = devices.peak_memory(device)
    if spec.compile == "off":
        return _record(pending, memory.step, _figures(memory) | resident)
    # Without the peak, only the tables of what backward keeps are known.
    record = _record(pending, memory.step, resident, note=UNSEEN_PEAK)
    tables = {name: table for name, table in record.tables.items() if name != AT_THE_PEAK}
    return dataclasses.replace(record, series={}, tables=tables)


def _pending(spec: MemorySpec) -> Record:
    """Returns the record before the run: spec and environment, no results."""
    return Record.of(spec, environment=environment(torch.device(spec.device)))


def _with_solution(pending: Record, solution: Solution) -> Record:
    """Returns the record with the plan that was chosen for its checkpointing budget."""
    environment = {**pending.environment, **solution.environment()}
    return dataclasses.replace(pending, environment=environment, note=solution.note)


def _measured_by_allocator(
    spec: MemorySpec, device: torch.device, folder: Path | None, plan: RecomputePlan | None
) -> tuple[MemoryTimeline, dict[str, float]]:
    """Returns the timeline of the last tracked step, and the byte figures of the record.

    The timeline shows what holds the memory. The peaks come from one more step, which is not tracked.
    It needs a fresh process: memory that an earlier step left allocated, such as cuBLAS workspaces,
    would raise the baseline from which the peaks are counted.
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
            run_step = track_step(
                spec, device, tracker, around_forward_only=peak_of(FORWARD_ONLY), plan=plan
            )
        devices.synchronize(device)
        snapshot = history.snapshot(device)
    run_step(peak_of)
    if folder is not None:
        history.save(snapshot, _snapshot_path(spec, folder))
    allocations = history.joined(history.trace_of(snapshot, device), tracker, first=first)
    timeline = step_memory(tracker, allocations, caching=True).step
    peaks["peak_bytes"] = max(peaks[f"{name}_peak_bytes"] for name in TRAINING_PHASES)
    held = timeline.peak.held
    parts = {f"{_metric(name)}_bytes": float(held[name]) for name in CATEGORIES}
    parts["unexplained_bytes"] = peaks["peak_bytes"] - sum(held.values())
    parts["reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device)
    return timeline, {**peaks, **parts}


def _snapshot_path(spec: MemorySpec, folder: Path) -> Path:
    digest = hashlib.sha256(Record.of(spec).key.encode()).hexdigest()[:8]
    snapshots = folder / "snapshots"
    snapshots.mkdir(parents=True, exist_ok=True)
    length = getattr(spec.model, "context_length", "")  # a user's model may have none
    return snapshots / f"{spec.size}-{spec.precision}-{length}-{digest}.pickle"


def _figures(memory: StepMemory) -> dict[str, float]:
    timeline = memory.step
    peaks = {
        f"{_metric(phase.name)}_peak_bytes": timeline.peak_of(phase) for phase in timeline.phases
    }
    parts = {f"{_metric(name)}_bytes": timeline.peak.held[name] for name in CATEGORIES}
    reserved = {"reserved_peak_bytes": timeline.reserved} if timeline.reserved else {}
    return {
        "peak_bytes": timeline.peak.total,
        f"{_metric(FORWARD_ONLY)}_peak_bytes": memory.forward_only_bytes,
        **peaks,
        **parts,
        **reserved,
    }


def _metric(name: str) -> str:
    return name.replace(" ", "_")


def _record(
    pending: Record, timeline: MemoryTimeline, figures: Mapping[str, float], **fields: Any
) -> Record:
    saved = timeline.saved_for_backward()
    blocks = by_block(saved, timeline.bytes_of)
    metrics = {name: Sample.exact(value, "bytes") for name, value in figures.items()}
    metrics["saved_for_backward_bytes"] = Sample.exact(sum(blocks.values()), "bytes")
    return dataclasses.replace(
        pending,
        metrics=metrics,
        series=_series(timeline),
        tables=_tables(timeline, blocks, saved),
        **fields,
    )


def _series(timeline: MemoryTimeline) -> dict[str, list[float]]:
    """Returns each category's bytes over the step's events, and the events at which phases begin."""
    moments = timeline.thinned()
    start = timeline.phases[0].start
    series = {"event": [float(max(0, moment.event - start)) for moment in moments]}
    for name in CATEGORIES:
        series[_metric(name)] = [float(moment.held[name]) for moment in moments]
    series["phase_start"] = [float(phase.start - start) for phase in timeline.phases]
    return series


def _tables(
    timeline: MemoryTimeline, blocks: Mapping[str, int], saved: Sequence[Any]
) -> dict[str, list[list[Any]]]:
    return {
        AT_THE_PEAK: [
            ["category", "module", "made by", "line", "phase", "tensors", "bytes"],
            *([*row] for row in timeline.holders(timeline.peak.event)[:LARGEST]),
        ],
        "saved_by_block": [["block", "bytes"], *([name, size] for name, size in blocks.items())],
        "savers": [
            ["kept by", "made by", "line", "tensors", "bytes"],
            *([*row] for row in savers(saved, timeline.bytes_of)),
        ],
    }
