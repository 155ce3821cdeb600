"""Samples, tokens and FLOPs per second of a measured step."""

from collections.abc import Sequence
from typing import Any

import torch

from stepgauge.measure.environment import device_name
from stepgauge.spec.hardware import peaks
from stepgauge.spec.record import Sample
from stepgauge.spec.throughput import StepWork, throughput
from stepgauge.spec.user_model import UserModel
from stepgauge.train.user_model import leaves_of


def rates(
    spec: Any, step_ms: Sequence[float], *, sequences: int, samples: int = 0, ranks: int = 1
) -> dict[str, Sample]:
    """Returns samples or tokens per second of all ranks together, and each rank's FLOPs per second,
    with MFU if the device's peak is known. `sequences` and `samples` are those of the whole step.
    """
    known = peaks(device_name(torch.device(spec.device)))
    peak = known.of(spec.precision) if known else None
    work = StepWork.of(spec.model, sequences=sequences, phases=spec.phases)
    counts = {"samples": samples, "tokens": work.tokens, "flops": work.flops / ranks}
    return throughput(step_ms, **counts, peak=peak)


def user_samples(spec: Any, batch: Any) -> int:
    """Returns the first dimension of the first tensor in the batch of a user's model: samples, as for
    micro-batches. 0 for other models, whose tokens are known.
    """
    if not isinstance(spec.model, UserModel):
        return 0
    tensors = (leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((len(tensor) for tensor in tensors), 0)
