"""A MemorySpec run: storages followed, beside the allocator's figures and the prediction. `run`
gives its record.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stepgauge.bench import step as bench_step
from stepgauge.bench.storage_tracking import (
    FORWARD_ONLY,
    STEPS,
    Followed,
    follow,
    pictures,
    predict,
)
from stepgauge.measure import devices
from stepgauge.measure.environment import environment
from stepgauge.measure.memory import history
from stepgauge.measure.memory.storage_tracker import CATEGORIES, Follower
from stepgauge.measure.memory.timeline import LARGEST, Picture, by_block, savers
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.record import Record, Sample

UNSEEN_PEAK = (
    "the peak is not seen: what compiled code holds while it runs can be followed on CUDA only"
)
AT_THE_PEAK = "at_the_peak"


def check(spec: MemorySpec) -> None:
    """Raises ValueError for what the spec asks together but cannot have, before anything is built."""
    if spec.predict == "no":
        bench_step.check(spec)
        if spec.compile != "off" and not spec.kept_is_told and not spec.device.startswith("cuda"):
            raise ValueError(
                f"checkpointing is {spec.checkpointing!r} around blocks that are compiled one by one; what is kept "
                "then can be followed on CUDA only (compile the whole model: --compile on)"
            )


def run(spec: MemorySpec, *, folder: Path | None = None) -> Record:
    """Predicts the step's memory, then measures it, unless prediction is all that is asked for.

    What does not fit is a record with status "oom" whose figures are the prediction's; what is
    predicted has provenance "modelled". The allocator's snapshot goes to the folder. Of a compiled
    step there is no prediction, and on a CPU no peak: its record has what backward keeps.
    """
    check(spec)
    asked = Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        environment=environment(torch.device(spec.device)),
    )
    predicted = predict(spec) if spec.compile == "off" else None
    if spec.predict != "no":
        assert predicted is not None
        return _modelled(asked, predicted, note=f"predicted for {spec.predict}")
    try:
        found, figures = _measured(spec, folder, predicted)
    except Exception as error:
        reason = devices.out_of_memory_reason(error)
        if reason is None or predicted is None:
            raise
        return _modelled(asked, predicted, status="oom", note=reason)
    if predicted is not None:
        figures |= _compared(figures, predicted)
    return (
        _record(asked, found, figures)
        if "peak_bytes" in figures
        else _without_peak(asked, found, figures)
    )


def _measured(
    spec: MemorySpec, folder: Path | None, predicted: Followed | None
) -> tuple[Picture, dict[str, float]]:
    device = torch.device(spec.device)
    if device.type == "cuda":
        return _measured_by_allocator(spec, device, folder)
    if predicted is not None and device.type == "cpu":
        devices.require_host_memory(predicted.step.peak.total)
    follower = Follower(device)
    with follower if spec.compile == "off" else contextlib.nullcontext():
        follow(spec, device, follower, steps=STEPS)
    found = pictures(follower, follower.allocations, caching=False)
    return found.step, {
        **(_figures(found) if spec.compile == "off" else {}),
        **devices.peak_memory(device),
    }


def _measured_by_allocator(
    spec: MemorySpec, device: torch.device, folder: Path | None
) -> tuple[Picture, dict[str, float]]:
    """The last step but one runs alone, for its peaks; the last is followed, for whose bytes they
    are.

    Wants a process of its own, as every row has: what an earlier step has left, such as cuBLAS's
    workspaces, would be part of the level that its peaks are counted from.
    """
    first = history.event_count(device)
    baseline = torch.cuda.memory_allocated(device)
    follower = Follower(device, events=lambda: history.event_count(device))
    peaks: dict[str, float] = {}

    @contextlib.contextmanager
    def peak_of(name: str, number: int) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(device)
        yield
        if number == STEPS or name == FORWARD_ONLY:
            peaks[f"{_metric(name)}_peak_bytes"] = (
                torch.cuda.max_memory_allocated(device) - baseline
            )

    follows = follower if spec.compile == "off" else contextlib.nullcontext()
    with history.recording():
        with follows:
            # One step more than is predicted: the last one is the one that is followed.
            follow(spec, device, follower, steps=STEPS + 1, around=peak_of)
        devices.synchronize(device)
        found = history.snapshot(device)
    if folder is not None:
        history.save(found, snapshot_path(spec, folder))
    lives = history.joined(history.trace_of(found, device), follower, first=first)
    shown = pictures(follower, lives, caching=True)
    peaks["peak_bytes"] = max(
        peaks[f"{name}_peak_bytes"] for name in ("forward", "backward", "optimizer")
    )
    held = shown.step.peak.held
    parts = {f"{_metric(name)}_bytes": float(held[name]) for name in CATEGORIES}
    parts["unexplained_bytes"] = peaks["peak_bytes"] - sum(held.values())
    parts["reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device)
    return shown.step, {**peaks, **parts}


def snapshot_path(spec: MemorySpec, folder: Path) -> Path:
    """Where the allocator's snapshot of a row lies."""
    digest = hashlib.sha256(
        Record(kind=spec.kind, spec=dataclasses.asdict(spec)).key.encode()
    ).hexdigest()[:8]
    place = folder / "snapshots"
    place.mkdir(parents=True, exist_ok=True)
    length = getattr(spec.model, "context_length", "")  # a user's model may have none
    return place / f"{spec.size}-{spec.precision}-{length}-{digest}.pickle"


def _figures(found: Followed) -> dict[str, float]:
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


def _compared(figures: Mapping[str, float], predicted: Followed) -> dict[str, float]:
    """The prediction and its signed error, of the step and of the forward pass alone."""
    peak, alone = predicted.step.peak.total, predicted.forward_only_bytes
    return {
        "predicted_peak_bytes": peak,
        "predicted_error": peak / figures["peak_bytes"] - 1,
        "predicted_forward_only_peak_bytes": alone,
        "predicted_forward_only_error": alone / figures["forward_only_peak_bytes"] - 1,
    }


def _metric(name: str) -> str:
    return name.replace(" ", "_")


def _modelled(asked: Record, predicted: Followed, **fields: Any) -> Record:
    """The record whose figures are the prediction's."""
    figures = {**_figures(predicted), "predicted_peak_bytes": predicted.step.peak.total}
    return _record(asked, predicted.step, figures, provenance="modelled", **fields)


def _record(asked: Record, found: Picture, figures: Mapping[str, float], **fields: Any) -> Record:
    saved = found.saved_for_backward()
    blocks = by_block(saved, found.bytes_of)
    metrics = {
        name: Sample.exact(value, "signed fraction" if name.endswith("_error") else "bytes")
        for name, value in figures.items()
    }
    metrics["saved_for_backward_bytes"] = Sample.exact(sum(blocks.values()), "bytes")
    return dataclasses.replace(
        asked,
        metrics=metrics,
        series=_series(found),
        tables=_tables(found, blocks, saved),
        **fields,
    )


def _without_peak(asked: Record, found: Picture, figures: Mapping[str, float]) -> Record:
    """The record of a step of which only what backward keeps is known."""
    known = _record(asked, found, figures, note=UNSEEN_PEAK)
    tables = {name: table for name, table in known.tables.items() if name != AT_THE_PEAK}
    return dataclasses.replace(known, series={}, tables=tables)


def _series(found: Picture) -> dict[str, list[float]]:
    """The curve of each category over the step's events, and where its phases begin."""
    moments = found.thinned()
    start = found.phases[0].start
    return {
        "event": [float(max(0, moment.event - start)) for moment in moments],
        **{_metric(name): [float(moment.held[name]) for moment in moments] for name in CATEGORIES},
        "phase_start": [float(phase.start - start) for phase in found.phases],
    }


def _tables(
    found: Picture, blocks: Mapping[str, int], saved: Sequence[Any]
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
