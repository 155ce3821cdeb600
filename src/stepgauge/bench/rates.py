"""Tokens and FLOPs per second of a measured step."""

from collections.abc import Sequence
from typing import Any

import torch

from stepgauge.measure.environment import device_name
from stepgauge.spec.hardware import peaks
from stepgauge.spec.record import Sample
from stepgauge.spec.step import StepSpec
from stepgauge.spec.throughput import throughput


def rates(spec: Any, step_ms: Sequence[float], *, tokens: int, flops: float) -> dict[str, Sample]:
    """Returns tokens and FLOPs per second, and MFU if the device's peak is known."""
    known = peaks(device_name(torch.device(spec.device)))
    peak = known.of(spec.precision) if known else None
    return throughput(step_ms, tokens=tokens, flops=flops, peak=peak)


def model_flops(spec: StepSpec) -> int:
    """Returns the model FLOPs of the timed phases: forward only, or forward and backward."""
    sequence = spec.network.context_length
    if spec.phases == "forward":
        return spec.network.forward_flops(batch=spec.batch, sequence=sequence)
    return spec.network.step_flops(batch=spec.batch, sequence=sequence)
