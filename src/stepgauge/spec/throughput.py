"""Throughput of a step: the one definition for measured and predicted steps."""

import dataclasses
from collections.abc import Iterable
from typing import Self

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Sample
from stepgauge.spec.user_model import UserModel


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The tokens and model FLOPs of a step; 0 if they are unknown, as for a user's model."""

    tokens: int = 0
    flops: int = 0

    @classmethod
    def of(
        cls, model: ModelSpec | BertSpec | UserModel, *, sequences: int, phases: str = "step"
    ) -> Self:
        """`phases` are those of a WorkSpec: forward only, or forward and backward."""
        if isinstance(model, UserModel):
            return cls()
        length = model.context_length
        count = model.forward_flops if phases == "forward" else model.step_flops
        return cls(sequences * length, count(batch=sequences, sequence=length))


def rate(work: float, ms: Iterable[float], unit: str) -> Sample:
    """Returns the work per second, where each of the times is that of all the work.

    The median is the work divided by the median time, p10 by the times' p90, and p90 by their p10.
    Mean and std are those of the single rates.
    """
    times = list(ms)
    durations = Sample.of(times, "ms")
    rates = Sample.of((work / time * 1e3 for time in times), f"{unit}/s")
    median, p10, p90 = (work / t * 1e3 for t in (durations.median, durations.p90, durations.p10))
    return dataclasses.replace(rates, median=median, p10=p10, p90=p90)


def throughput(
    step_ms: Iterable[float],
    *,
    samples: float = 0,
    tokens: float = 0,
    flops: float = 0,
    peak: float | None = None,
) -> dict[str, Sample]:
    """Returns samples_per_s, tokens_per_s and tflop_per_s, for counts that are above 0.

    peak  the device's dense FLOP/s, if known: adds mfu
    """
    times = list(step_ms)
    work_per_step = {
        "samples_per_s": (samples, "samples"),
        "tokens_per_s": (tokens, "tokens"),
        "tflop_per_s": (flops / 1e12, "TFLOP"),
    }
    rates = {name: rate(work, times, unit) for name, (work, unit) in work_per_step.items() if work}
    if flops and peak:
        share = rate(flops / peak, times, "")
        rates["mfu"] = dataclasses.replace(share, unit="fraction of dense peak")
    return rates
