"""Times one call of an operation on a busy device: among calls of the same kind, or alternating with
other work as in a step.

A GPU at its power limit lowers its clock. Products back to back run slower than in a step, where passes
over memory between them draw less power. Passes back to back run faster than between products.
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
# The operation runs this long, and then the other work; the products of a block take about as long.
TURN_US = 500.0
LEAST_TURNS = 4
# A GPU runs the operation this long before it is timed. It is idle while a shape is prepared, and would
# start at a clock that it cannot hold in a step. With warm-up, products took 3.2 % longer on one H200, as
# they do in a step (docs/log/2026-11-23-predictions.md). If there are many shapes, each needs less.
WARM_UP_MS = 100.0
WARM_UP_PER_OPERATION_MS = 3000.0  # all shapes of an operation together
SHORT_US = 500.0  # the host may launch shorter calls more slowly than the GPU runs them
MOST_CALLS = 200
METRICS = {"MHz": "clock_mhz", "W": "power_w"}  # names of readings in records


class Timing(NamedTuple):
    """Microseconds per call.

    at_host_pace  a short call on a GPU could not be captured, so the time may be that of its launch
    """

    us: float
    at_host_pace: bool = False


class OtherWork(NamedTuple):
    """Work that alternates with an operation, and the microseconds of one call."""

    call: Call
    us: float


def time_of(
    make: Callable[[], Call],
    device: torch.device,
    milliseconds: float,
    other: OtherWork | None = None,
    *,
    warm_up_ms: float = 0.0,
) -> Timing:
    """Returns the median time of a call, over loops that take `milliseconds` each.

    With other work, it is the median over turns that together take as long as all loops. A GPU first
    runs the same for `warm_up_ms`.
    """
    with on_capture_stream(device):
        call = make()
        call()
        call_us = loop(call, device, 2)
        is_short = device.type == "cuda" and call_us < SHORT_US
        if other:
            return _in_turns(
                call, call_us, device, milliseconds, other, warm_up_ms, is_short=is_short
            )
        count = max(2, min(MOST_CALLS, round(milliseconds * 1e3 / max(call_us, 1e-3))))
        replay = record_repeated(call, count, device) if is_short else None
        if replay is not None:
            warm_up(replay, count * call_us, warm_up_ms)
            return Timing(statistics.median(loop(replay, device, 2) for _ in range(LOOPS)) / count)
        warm_up(call, call_us, warm_up_ms)
        us = statistics.median(loop(call, device, count) for _ in range(LOOPS))
        return Timing(us, at_host_pace=is_short)


def _in_turns(
    call: Call, call_us: float, device: torch.device, milliseconds: float, other: OtherWork,
    warm_up_ms: float, *, is_short: bool,
) -> Timing:  # fmt: skip
    count = _calls_per_turn(call_us)
    replay = record_repeated(call, count, device) if is_short else None
    if replay is not None:
        call_us = loop(replay, device, 2) / count
        if _calls_per_turn(call_us) > 2 * count:  # launches were much slower than the calls
            count = _calls_per_turn(call_us)
            replay = record_repeated(call, count, device)
    turn = Turn(replay or call, 1 if replay else count, other, count * call_us)
    warm_up(turn, 2 * turn.us, warm_up_ms)
    rounds = max(LEAST_TURNS, round(LOOPS * milliseconds * 1e3 / (2 * turn.us)))
    us = statistics.median(turn.times(device, rounds)) / count
    return Timing(us, at_host_pace=is_short and replay is None)


def warm_up_ms_for(shapes: int, device: torch.device) -> float:
    """Returns the warm-up before each shape. A CPU needs none, because it holds its clock."""
    return (
        min(WARM_UP_MS, WARM_UP_PER_OPERATION_MS / max(1, shapes)) if device.type == "cuda" else 0.0
    )


def warm_up(call: Call, us: float, milliseconds: float) -> None:
    """Repeats a call that takes `us`, without waiting, so that timing starts on a busy device."""
    for _ in range(math.ceil(milliseconds * 1e3 / us)):
        call()


def _calls_per_turn(call_us: float) -> int:
    return max(1, min(MOST_CALLS, round(TURN_US / max(call_us, 1e-3))))


@dataclasses.dataclass(frozen=True)
class Turn:
    """`count` calls, which take `us` together, and the other work for as long."""

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
        """Returns the microseconds of the calls in each of `rounds` turns, on a GPU."""
        events = []
        for _ in range(rounds):
            before, after = (torch.Event(device, enable_timing=True) for _ in range(2))
            self.between()
            before.record()
            for _ in range(self.count):
                self.call()
            after.record()
            events.append((before, after))
        devices.synchronize(device)
        return [before.elapsed_time(after) * 1e3 for before, after in events]


def loop(call: Call, device: torch.device, count: int) -> float:
    """Returns the microseconds per call of `count` calls."""
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
    """Returns the device's clock in MHz and, for a GPU, its power in W."""
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
