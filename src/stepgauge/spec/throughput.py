"""What a step does by the second: one definition for measured and predicted steps."""

import dataclasses
from collections.abc import Iterable

from stepgauge.spec.record import Sample


def rate(work: float, ms: Iterable[float], unit: str) -> Sample:
    """Work, counted in the unit, by the second of these times: its median is the work over the median
    time, its p10 over the p90 of the times. The mean and std are those of each time's rate.
    """
    times = list(ms)
    taken = Sample.of(times, "ms")
    each = Sample.of((work / time * 1e3 for time in times), f"{unit}/s")
    median, p10, p90 = (work / time * 1e3 for time in (taken.median, taken.p90, taken.p10))
    return dataclasses.replace(each, median=median, p10=p10, p90=p90)


def throughput(
    step_ms: Iterable[float],
    *,
    samples: float = 0,
    tokens: float = 0,
    flops: float = 0,
    peak: float | None = None,
) -> dict[str, Sample]:
    """The rates of what is counted in a step: samples_per_s, tokens_per_s, tflop_per_s, and mfu where
    the device's dense peak in FLOP/s is known.
    """
    times = list(step_ms)
    counted = {
        "samples_per_s": (samples, "samples"),
        "tokens_per_s": (tokens, "tokens"),
        "tflop_per_s": (flops / 1e12, "TFLOP"),
    }
    found = {name: rate(work, times, unit) for name, (work, unit) in counted.items() if work}
    if flops and peak:
        share = rate(flops / peak, times, "")
        found["mfu"] = dataclasses.replace(share, unit="fraction of dense peak")
    return found
