"""How long one call of an operation takes while calls follow one another without a pause."""

import statistics
import time
from pathlib import Path

import torch

from stepgauge.calibrate.operations import Call
from stepgauge.measure import devices

LOOPS = 3
SHORT_US = 500.0  # shorter calls may be launched slower than they run
MOST_CALLS = 200
METRICS = {"MHz": "clock_mhz", "W": "power_w"}  # what a device tells, as records name it


def microseconds(call: Call, device: torch.device, milliseconds: float) -> float:
    """Median over loops of the mean of a loop's calls, a loop of so many milliseconds."""
    call()
    once = loop(call, device, 2)
    count = max(2, min(MOST_CALLS, round(milliseconds * 1e3 / max(once, 1e-3))))
    if device.type == "cuda" and once < SHORT_US:
        replay = _captured(call, count)
        return statistics.median(loop(replay, device, 2) for _ in range(LOOPS)) / count
    return statistics.median(loop(call, device, count) for _ in range(LOOPS))


def _captured(call: Call, count: int) -> Call:
    """The calls as one CUDA graph: short ones would else be timed at the host's pace. Where they
    cannot be captured, the calls themselves.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()

        def calls() -> None:
            for _ in range(count):
                call()

        return calls
    return graph.replay


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
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return {"MHz": statistics.fmean(clocks)} if clocks else {}
