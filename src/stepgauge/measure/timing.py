"""Clocks. How a figure in milliseconds comes about is decided here and nowhere else."""

import itertools
import time
from collections.abc import Callable, Mapping

import torch

from stepgauge.measure.devices import synchronize
from stepgauge.runtime.progress import tell
from stepgauge.trace.collector import without_collector

Phases = Mapping[str, Callable[[], None]]


def time_phases(
    phases: Phases, device: torch.device, *, warmup: int, steps: int, seconds: float = 0.0
) -> dict[str, list[float]]:
    """Milliseconds of each phase and of the whole step ("step"), one value a timed step.

    The phases run in order, `warmup` times untimed, then at least `steps` times and for at least
    `seconds`: the median of a short step needs many, since clocks rise and the host is not alone.
    On an accelerator, events mark the boundaries on the device's own queue and the host waits once
    a step, at its end: phases add up to the step and no wait between them is measured. On the CPU
    the clock is time.perf_counter.
    """
    clock = clock_of(device)
    for number in range(warmup):
        tell(f"warm-up {number + 1} of {warmup}", count=True)
        for phase in phases.values():
            phase()
    synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in (*phases, "step")}
    with without_collector():
        end = time.perf_counter() + seconds
        while len(times["step"]) < steps or time.perf_counter() < end:
            marks = clock(phases, device)
            for name, milliseconds in zip(phases, marks, strict=True):
                times[name].append(milliseconds)
            times["step"].append(sum(marks))
            tell(f"timed {len(times['step'])}, at least {steps}", count=True)  # between two steps
    return times


def clock_of(device: torch.device) -> Callable[[Phases, torch.device], list[float]]:
    """What runs the phases once and gives the milliseconds of each."""
    return _event_clock if device.type in ("cuda", "mps") else _host_clock


def _event_clock(phases: Phases, device: torch.device) -> list[float]:
    events = [torch.Event(device, enable_timing=True) for _ in range(len(phases) + 1)]
    events[0].record()
    for phase, event in zip(phases.values(), events[1:], strict=True):
        phase()
        event.record()
    synchronize(device)
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def _host_clock(phases: Phases, device: torch.device) -> list[float]:
    marks = [time.perf_counter()]
    for phase in phases.values():
        phase()
        marks.append(time.perf_counter())
    return [(after - before) * 1e3 for before, after in itertools.pairwise(marks)]
