"""Several implementations of one thing timed in turns, so that clocks that drift hit all alike."""

import contextlib
import gc
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from stepgauge.measure.devices import synchronize

ROUNDS = 3
WARMUP_SHARE = 0.25
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
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Milliseconds of each call, one value a repeat, and what those that raised have raised.

    Each call is repeated for `seconds` in all, at least once a round, split over `rounds` in which
    every call has its turn, after a first call that is not timed. On CUDA this is
    triton.testing.do_bench: events around a call, the L2 cache overwritten before it, so that what
    the host takes to launch shows where it is longer than that. Elsewhere it is the host's clock.
    `around` are contexts, entered before a call's turn and left after it. One that raises is out
    from there on.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    failures: dict[str, Exception] = {}
    clock = _device_times if device.type == "cuda" else _host_times
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in [name for name in calls if name not in failures]:
                try:
                    with around.get(name, contextlib.nullcontext)():
                        times[name] += clock(calls[name], device, seconds / rounds)
                except Exception as error:
                    # a traceback holds the tensors of its frames
                    failures[name] = error.with_traceback(None)
    finally:
        if was_enabled:
            gc.enable()
    return times, failures


def _device_times(call: Call, device: torch.device, seconds: float) -> list[float]:
    from triton.testing import do_bench

    with torch.cuda.device(device):
        call()
        return do_bench(
            call, warmup=WARMUP_SHARE * seconds * 1e3, rep=seconds * 1e3, return_mode="all"
        )


def _host_times(call: Call, device: torch.device, seconds: float) -> list[float]:
    call()
    synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return times
