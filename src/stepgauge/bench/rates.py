"""Tokens and FLOPs per second of a measured step."""

from collections.abc import Sequence
from typing import Any

import torch

from stepgauge.measure.environment import device_name
from stepgauge.spec.hardware import peaks
from stepgauge.spec.record import Sample
from stepgauge.spec.throughput import StepWork, throughput


def rates(
    spec: Any, step_ms: Sequence[float], *, sequences: int, ranks: int = 1
) -> dict[str, Sample]:
    """Returns tokens per second of all ranks together, and each rank's FLOPs per second, with MFU if
    the device's peak is known. `sequences` are those of the whole step.
    """
    known = peaks(device_name(torch.device(spec.device)))
    peak = known.of(spec.precision) if known else None
    work = StepWork.of(spec.model, sequences=sequences, phases=spec.phases)
    return throughput(step_ms, tokens=work.tokens, flops=work.flops / ranks, peak=peak)
