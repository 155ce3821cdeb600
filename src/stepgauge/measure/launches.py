"""What one call of a function launches: each kernel of the device with its calls and time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stepgauge.measure.devices import synchronize
from stepgauge.measure.profiler import without_marks

CALLS = 5


@dataclasses.dataclass(frozen=True)
class Launched:
    """A kernel, or on a CPU an operator, in one call of the function."""

    name: str
    calls: float
    us: float


def launches(
    call: Callable[[], Any], device: torch.device, before: Callable[[], Any] | None = None
) -> list[Launched]:
    """Means over some calls, most time first; on a CPU each operator's own time.

    With `before`, which prepares a call, of a single call.
    """
    num_calls = 1 if before else CALLS
    without_marks()
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
    found = []
    for event in profiled.key_averages():
        us = event.self_device_time_total if on_device else event.self_cpu_time_total
        if us > 0:
            found.append(Launched(event.key, event.count / num_calls, us / num_calls))
    return sorted(found, key=lambda each: -each.us)
