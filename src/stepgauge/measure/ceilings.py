"""Measures the two limits of the roofline: the device's fastest matrix product and fastest copy."""

from collections.abc import Callable
from typing import Any

import torch

from stepgauge.measure import cpu_contention
from stepgauge.measure.cpu_contention import missed_cores, span_since
from stepgauge.measure.timing import time_phases
from stepgauge.spec.analysis import Ceilings

_MATRIX = {"cuda": 8192, "cpu": 1024}
SECONDS = 0.2  # time for each of the two measurements
_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # far more than any cache


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Returns the best FLOP/s and bytes/s of several samples. Bytes read and written both count."""
    before = cpu_contention.reading()
    size = _MATRIX.get(device.type, 2048)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    product_ms = _best(lambda: torch.mm(left, right, out=product), device)
    source = torch.empty(
        _COPIED_BYTES.get(device.type, 1 << 28) // 4, device=device, dtype=torch.float32
    ).normal_()
    target = torch.empty_like(source)
    copy_ms = _best(lambda: target.copy_(source), device)
    span = span_since(before) if device.type == "cpu" else None
    missed = missed_cores([span], torch.get_num_threads()) if span else 0.0
    name = str(dtype).removeprefix("torch.")
    return Ceilings(
        flop_per_s=2.0 * size**3 / product_ms * 1e3,
        bytes_per_s=2.0 * source.nbytes / copy_ms * 1e3,
        condition=f"{name} product of {size}³; copy of {source.nbytes / 2**20:.0f} MiB, read and written",
        missed_cores=missed,
    )


def _best(call: Callable[[], Any], device: torch.device) -> float:
    return min(time_phases({"call": call}, device, warmup=3, steps=5, seconds=SECONDS)["call"])
