"""How long one call of an operation takes while the device never rests: among calls of its own kind,
or in turns with other work, as in a step.

A GPU at its power limit lowers its clock. Products alone run slower than in a step, where passes
over memory between them draw less; passes alone run faster than between products.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from stepgauge.measure import devices
from stepgauge.runtime.recording import Call, on_capture_stream, record_repeated

LOOPS = 3
# Of the operation, then as long of the other work: products of a block last so long.
TURN_US = 500.0
LEAST_TURNS = 4
# Before the clock runs a GPU does for so long what is timed: while a shape is made it rests, and begins
# the next at a clock that no step holds. Products took 3.2 % longer so on one H200, as they do in a
# step (docs/log/2026-11-23-predictions.md). Of many shapes one after the other, less keeps it warm.
HEAT_MS = 100.0
HEATS_MS = 3000.0  # of all shapes of an operation
SHORT_US = 500.0  # shorter calls may be launched slower than they run
MOST_CALLS = 200
METRICS = {"MHz": "clock_mhz", "W": "power_w"}  # what a device tells, as records name it


class Timing(NamedTuple):
    """Microseconds a call; `at_host_pace`: of a short one on a GPU that could not be captured."""

    us: float
    at_host_pace: bool = False


class OtherWork(NamedTuple):
    """What an operation takes turns with, and microseconds of one call of it."""

    call: Call
    us: float


def time_of(
    make: Callable[[], Call],
    device: torch.device,
    milliseconds: float,
    beside: OtherWork | None = None,
    *,
    heat_ms: float = 0.0,
) -> Timing:
    """Median over loops of the mean of a loop's calls, a loop of so many milliseconds; or over turns
    with the other work, which together last as long as all loops. A GPU does the same for
    `heat_ms` before.
    """
    with on_capture_stream(device):
        call = make()
        call()
        once = loop(call, device, 2)
        is_short = device.type == "cuda" and once < SHORT_US
        if beside:
            return _in_turns(call, once, device, milliseconds, beside, heat_ms, is_short=is_short)
        count = max(2, min(MOST_CALLS, round(milliseconds * 1e3 / max(once, 1e-3))))
        replay = record_repeated(call, count, device) if is_short else None
        if replay is not None:
            heat(replay, count * once, heat_ms)
            return Timing(statistics.median(loop(replay, device, 2) for _ in range(LOOPS)) / count)
        heat(call, once, heat_ms)
        us = statistics.median(loop(call, device, count) for _ in range(LOOPS))
        return Timing(us, at_host_pace=is_short)


def _in_turns(
    call: Call, once: float, device: torch.device, milliseconds: float, beside: OtherWork,
    heat_ms: float, *, is_short: bool,
) -> Timing:  # fmt: skip
    count = _calls(once)
    replay = record_repeated(call, count, device) if is_short else None
    if replay is not None:
        once = loop(replay, device, 2) / count
        if _calls(once) > 2 * count:  # the host was so much slower
            count = _calls(once)
            replay = record_repeated(call, count, device)
    turn = Turn(replay or call, 1 if replay else count, beside, count * once)
    heat(turn, 2 * turn.us, heat_ms)
    rounds = max(LEAST_TURNS, round(LOOPS * milliseconds * 1e3 / (2 * turn.us)))
    us = statistics.median(turn.times(device, rounds)) / count
    return Timing(us, at_host_pace=is_short and replay is None)


def heat_of(shapes: int, device: torch.device) -> float:
    """Milliseconds of heat before each of so many shapes; a CPU holds its clock."""
    return min(HEAT_MS, HEATS_MS / max(1, shapes)) if device.type == "cuda" else 0.0


def heat(call: Call, us: float, milliseconds: float) -> None:
    """The call, which takes `us`, again and again without waiting for it, so that what is timed
    follows without a rest.
    """
    for _ in range(math.ceil(milliseconds * 1e3 / us)):
        call()


def _calls(once: float) -> int:
    """Of a turn."""
    return max(1, min(MOST_CALLS, round(TURN_US / max(once, 1e-3))))


@dataclasses.dataclass(frozen=True)
class Turn:
    """So many calls, which take `us`, and the other work for as long."""

    call: Call
    count: int
    other: OtherWork
    us: float

    def __call__(self) -> None:
        self.between()
        for _ in range(self.count):
            self.call()

    def between(self) -> None:
        for _ in range(max(1, round(self.us / self.other.us))):
            self.other.call()

    def times(self, device: torch.device, rounds: int) -> list[float]:
        """Microseconds of the calls in each of so many turns, on a GPU."""
        found = []
        for _ in range(rounds):
            before, after = (torch.Event(device, enable_timing=True) for _ in range(2))
            self.between()
            before.record()
            for _ in range(self.count):
                self.call()
            after.record()
            found.append((before, after))
        devices.synchronize(device)
        return [before.elapsed_time(after) * 1e3 for before, after in found]


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
