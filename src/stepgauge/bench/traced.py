"""How much of a step's communication is hidden behind computing, from traces of a few profiled
steps.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from stepgauge.measure.profiler import ProfilerSchedule, profile_phases
from stepgauge.measure.timing import Phases
from stepgauge.spec.analysis import TRACKS, Overlap
from stepgauge.trace.attribution import Resolver
from stepgauge.trace.events import load
from stepgauge.trace.intervals import Intervals
from stepgauge.trace.overlap import busy, overlap

STEPS = 2
MOST_INTERVALS = 500  # of a track in a record: what a picture can show


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceFigures:
    """What one rank's profiled steps said.

    step_ms  of each profiled step by the stopwatch: far from an unprofiled one's, the overlap is
             not that one's
    overlap  of all profiled steps together
    tracks    when the last one communicated and computed, in ms from its begin
    """

    step_ms: list[float]
    overlap: Overlap
    tracks: dict[str, list[float]]


def trace_steps(phases: Phases, device: torch.device) -> TraceFigures | None:
    """Profiles a few steps, each in a trace of its own; None for steps without communication."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = ProfilerSchedule(wait=0, warmup=1, active=1, repeat=STEPS)
        # A rank whose profiler is ready late would let the others communicate for as long.
        together = {"align": _align_hosts, **phases} if device.type == "cuda" else phases
        paths, watched = profile_phases(
            together, device, Path(folder), schedule=schedule, kernels_alone=True
        )
        found = overlap(load(*paths))
        if found is None:
            return None
        step_ms = [sum(times) for times in zip(*(watched[name] for name in phases), strict=True)]
        return TraceFigures(step_ms=step_ms, overlap=found, tracks=_tracks(paths))


def _align_hosts() -> None:
    """A barrier over Gloo, of which nothing is on a GPU."""
    dist.all_reduce(torch.zeros(1))


def _tracks(paths: Sequence[Path]) -> dict[str, list[float]]:
    trace = load(paths[-1])
    begin, end, _ = trace.steps[-1]
    if trace.on_device:
        # The device runs behind the host: its own first kernel of the step is the beginning.
        begin, end = min(k.start for k in trace.kernels), max(k.end for k in trace.kernels)
    tracks: dict[str, list[float]] = {}
    works = list(Resolver(trace).work())
    communication, computation = busy(trace, works)
    for name, intervals in zip(TRACKS, (computation, communication), strict=True):
        shown = _longest([(a, b) for a, b in intervals if a >= begin and b <= end])
        tracks[f"{name}_start_ms"] = [(a - begin) / 1e3 for a, _ in shown]
        tracks[f"{name}_end_ms"] = [(b - begin) / 1e3 for _, b in shown]
    return tracks


def _longest(times: Intervals) -> Intervals:
    return sorted(sorted(times, key=lambda time: time[0] - time[1])[:MOST_INTERVALS])
