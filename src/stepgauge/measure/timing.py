"""The clocks with which the phases of a step are timed."""

import itertools
import time
from collections.abc import Callable, Mapping

import torch

from stepgauge.measure.devices import synchronize
from stepgauge.runtime.progress import report_progress
from stepgauge.trace.collector import without_collector

Phases = Mapping[str, Callable[[], None]]


def time_phases(
    phases: Phases,
    device: torch.device,
    *,
    warmup: int,
    steps: int,
    seconds: float = 0.0,
    after_step: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Returns the ms of each phase and of the whole step ("step"), one value per timed step.

    The phases run in order, `warmup` times untimed, then at least `steps` times and for at least
    `seconds`. Short steps need many repetitions, because clock rates rise and other processes
    disturb. On an accelerator, events in the device's queue mark the boundaries, and the host waits
    only at the end of a step. So the phases add up to the step, and no wait between them is measured.
    On a CPU the clock is time.perf_counter.

    after_step  called after each timed step, outside of the timing
    """
    clock = clock_of(device)
    for number in range(warmup):
        report_progress(f"warm-up {number + 1} of {warmup}", count=True)
        for phase in phases.values():
            phase()
    synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in (*phases, "step")}
    with without_collector():
        end = time.perf_counter() + seconds
        while len(times["step"]) < steps or time.perf_counter() < end:
            phase_ms = clock(phases, device)
            for name, milliseconds in zip(phases, phase_ms, strict=True):
                times[name].append(milliseconds)
            times["step"].append(sum(phase_ms))
            after_step()
            report_progress(
                f"timed {len(times['step'])}, at least {steps}", count=True
            )  # outside of the timing
    return times


def clock_of(device: torch.device) -> Callable[[Phases, torch.device], list[float]]:
    """Returns the function that runs the phases once and returns the ms of each."""
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
