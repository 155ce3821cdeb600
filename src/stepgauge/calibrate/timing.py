"""How long one call of an operation takes while calls follow one another without a pause."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from stepgauge.calibrate.capture import Call, captured, on_its_stream
from stepgauge.measure import devices

LOOPS = 3
SHORT_US = 500.0  # shorter calls may be launched slower than they run
MOST_CALLS = 200
METRICS = {"MHz": "clock_mhz", "W": "power_w"}  # what a device tells, as records name it


class Timing(NamedTuple):
    """Microseconds a call; `at_host_pace`: of a short one on a GPU that could not be captured."""

    us: float
    at_host_pace: bool = False


def time_of(make: Callable[[], Call], device: torch.device, milliseconds: float) -> Timing:
    """Median over loops of the mean of a loop's calls, a loop of so many milliseconds."""
    with on_its_stream(device):
        call = make()
        call()
        once = loop(call, device, 2)
        count = max(2, min(MOST_CALLS, round(milliseconds * 1e3 / max(once, 1e-3))))
        is_short = device.type == "cuda" and once < SHORT_US
        replay = captured(call, count, device) if is_short else None
        if replay is not None:
            return Timing(statistics.median(loop(replay, device, 2) for _ in range(LOOPS)) / count)
        us = statistics.median(loop(call, device, count) for _ in range(LOOPS))
        return Timing(us, at_host_pace=is_short)


def loop(call: Call, device: torch.device, count: int) -> float:
    """Microseconds a call."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e6 / count
    before, after = (torch.Event(device, enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(count):
        call()
    after.record()
    devices.synchronize(device)
    return before.elapsed_time(after) * 1e3 / count


def clock_and_power(device: torch.device) -> dict[str, float]:
    """What the device tells now: its clock in MHz, and of a GPU its power in W."""
    if device.type == "cuda":
        return {
            "MHz": float(torch.cuda.clock_rate(device)),
            "W": torch.cuda.power_draw(device) / 1e3,
        }
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return {"MHz": statistics.fmean(clocks)} if clocks else {}
