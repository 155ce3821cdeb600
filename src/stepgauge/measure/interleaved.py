"""Times several implementations in turns, so that a drifting clock rate affects all alike."""

import contextlib
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from stepgauge.measure.devices import synchronize
from stepgauge.trace.collector import without_collector

ROUNDS = 3
WARMUP_SHARE = 0.25
L2_BYTES = 256 << 20  # larger than any GPU's L2 cache; do_bench uses the same size
Call = Callable[[], Any]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
_NONE: Mapping[str, Context] = MappingProxyType({})


def time_interleaved(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    seconds: float,
    rounds: int = ROUNDS,
    around: Mapping[str, Context] = _NONE,
    before: Call | None = None,
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Returns the ms of each call, one value per repetition, and the exceptions of failed calls.

    Each call is repeated for `seconds` in total, split over `rounds` in which every call has its
    turn: an untimed call, then at least one timed call. A call that raises is not repeated. On CUDA
    it uses triton.testing.do_bench: events around each call, with the L2 cache overwritten before
    it. The host launches the call while the cache is overwritten, so launch time shows only if it is
    longer than that. Elsewhere it uses the host's clock.

    around  context managers of the calls, entered for each turn
    before  runs before each single call and is not timed
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    failures: dict[str, Exception] = {}
    clock = _device_times if device.type == "cuda" else _host_times
    with without_collector():
        for _ in range(rounds):
            for name in [name for name in calls if name not in failures]:
                try:
                    with around.get(name, contextlib.nullcontext)():
                        times[name] += clock(calls[name], device, seconds / rounds, before)
                except Exception as error:
                    # A traceback would keep the tensors of its frames alive.
                    failures[name] = error.with_traceback(None)
    return times, failures


def _device_times(
    call: Call, device: torch.device, seconds: float, before: Call | None
) -> list[float]:
    from triton.testing import do_bench

    with torch.cuda.device(device):
        if before:
            return _device_times_after(before, call, seconds)
        call()
        return do_bench(
            call, warmup=WARMUP_SHARE * seconds * 1e3, rep=seconds * 1e3, return_mode="all"
        )


def _device_times_after(before: Call, call: Call, seconds: float) -> list[float]:
    """Times like do_bench, but calls `before` before each call, which do_bench cannot do."""
    cache = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed() -> float:
        before()
        cache.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    timed()
    return _repeated(timed, seconds)


def _host_times(
    call: Call, device: torch.device, seconds: float, before: Call | None
) -> list[float]:
    def timed() -> float:
        if before:
            before()
        start = time.perf_counter()
        call()
        synchronize(device)
        return (time.perf_counter() - start) * 1e3

    timed()
    return _repeated(timed, seconds)


def _repeated(timed: Callable[[], float], seconds: float) -> list[float]:
    """Repeats the timed call for this many seconds, at least once, and returns the times."""
    end = time.perf_counter() + seconds
    times = [timed()]
    while time.perf_counter() < end:
        times.append(timed())
    return times
