"""Measures how much of a step's communication overlaps with compute, from a few profiled steps."""

import dataclasses
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from stepgauge.measure.profiler import ProfilerSchedule, profile_phases
from stepgauge.measure.timing import Phases
from stepgauge.spec.analysis import TRACKS, Overlap
from stepgauge.trace.attribution import Resolver
from stepgauge.trace.events import load
from stepgauge.trace.overlap import busy, overlap

STEPS = 2
MOST_INTERVALS = 500  # per track in a record; a picture cannot show more


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceFigures:
    """Results of one rank's profiled steps.

    step_ms  wall time of each profiled step. If it differs much from that of an unprofiled step, the
             overlap does not describe the unprofiled step.
    overlap  over all profiled steps
    tracks   when the last step communicated and computed, in ms from its start
    """

    step_ms: list[float]
    overlap: Overlap
    tracks: dict[str, list[float]]


def trace_steps(phases: Phases, device: torch.device) -> TraceFigures | None:
    """Profiles a few steps, one trace per step. Returns None if the steps do not communicate."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = ProfilerSchedule(wait=0, warmup=1, active=1, repeat=STEPS)
        # Without the barrier, ranks whose profiler is ready early would show the wait for the
        # others as communication.
        profiled = {"align": _align_hosts, **phases} if device.type == "cuda" else phases
        paths, wall_ms = profile_phases(
            profiled, device, Path(folder), schedule=schedule, kernels_only=True
        )
        result = overlap(load(*paths))
        if result is None:
            return None
        step_ms = [sum(times) for times in zip(*(wall_ms[name] for name in phases), strict=True)]
        return TraceFigures(step_ms=step_ms, overlap=result, tracks=_tracks(paths[-1]))


def _align_hosts() -> None:
    """A barrier over Gloo, which runs nothing on the GPU."""
    dist.all_reduce(torch.zeros(1))


def _tracks(path: Path) -> dict[str, list[float]]:
    trace = load(path)
    begin, end, _ = trace.steps[-1]
    if trace.on_device:
        # The device runs behind the host, so the step starts with its first kernel.
        begin, end = min(k.start for k in trace.kernels), max(k.end for k in trace.kernels)
    tracks: dict[str, list[float]] = {}
    communication, computation = busy(trace, list(Resolver(trace).work()))
    for name, intervals in zip(TRACKS, (computation, communication), strict=True):
        inside = [(a, b) for a, b in intervals if a >= begin and b <= end]
        longest = sorted(inside, key=lambda interval: interval[0] - interval[1])
        shown = sorted(longest[:MOST_INTERVALS])
        tracks[f"{name}_start_ms"] = [(a - begin) / 1e3 for a, _ in shown]
        tracks[f"{name}_end_ms"] = [(b - begin) / 1e3 for _, b in shown]
    return tracks
