"""Lists the kernels that one call of a function launches, with their calls and times."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stepgauge.measure.devices import synchronize
from stepgauge.measure.profiler import hide_profiler_messages

CALLS = 5


@dataclasses.dataclass(frozen=True)
class Launched:
    """A kernel, or an operator on a CPU: how often one call of the function runs it, and its µs."""

    name: str
    calls: float
    us: float


def launches(
    call: Callable[[], Any], device: torch.device, before: Callable[[], Any] | None = None
) -> list[Launched]:
    """Returns the means over several calls, the longest time first. On a CPU it is the time of each
    operator without those that it calls.

    before  prepares a call; with it, a single call is profiled
    """
    num_calls = 1 if before else CALLS
    hide_profiler_messages()
    on_device = device.type == "cuda"
    call()
    if before:
        before()
    synchronize(device)
    with profile(
        activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU], acc_events=True
    ) as profiled:
        for _ in range(num_calls):
            call()
        synchronize(device)
    launched = []
    for event in profiled.key_averages():
        us = event.self_device_time_total if on_device else event.self_cpu_time_total
        if us > 0:
            launched.append(Launched(event.key, event.count / num_calls, us / num_calls))
    return sorted(launched, key=lambda each: -each.us)
