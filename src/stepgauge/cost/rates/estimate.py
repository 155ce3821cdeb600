"""A time, its source, and how far it may be off."""

import dataclasses

from stepgauge.spec.record import Record, Sample

# How a time was found:
CALIBRATED = "calibrated"  # measured at exactly these sizes
INTERPOLATED = "interpolated"  # between measured sizes
EXTRAPOLATED = "extrapolated"  # outside of the measured sizes, at the rate of the nearest
TRANSFERRED = "transferred"  # from another device, by the ratio of published peaks
ASSUMED = "assumed"  # by a formula, or from another machine
TIMED_WHOLE = "timed whole"  # a share of the time of a whole block
UNTIMED = "untimed"  # by bytes or FLOPs, which say little about this operation


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Microseconds, and their source: one of the words above."""

    us: float
    source: str


# By source, the fraction by which a time may be off. Steps whose operations were calibrated or
# interpolated were within 3 and 5 % (docs/predict.md). The others are assumed. Batch and group norms,
# sums and pooling took 1.0 to 16 times as long as their bytes, 3 times in the median
# (docs/log/2026-11-24-predicted-kinds.md).
SPREAD = {
    CALIBRATED: 0.03, INTERPOLATED: 0.05, EXTRAPOLATED: 0.15, TRANSFERRED: 0.2, ASSUMED: 0.3,
    TIMED_WHOLE: 0.03, UNTIMED: 2.0,
}  # fmt: skip
# How many times as slow as the calibrated host another one may be, or the same one at another hour
# (docs/log/2026-11-23-predicted-again.md).
SLOWER_HOST = 1.7
# Name of a modelled record's table with other delays that the step may have, in microseconds.
INTERVAL = "interval"


def spread(record: Record) -> float:
    """Returns the fraction by which a modelled step may be off.

    It is the mean spread of the terms, weighted by their time, plus the delay by a slower host.
    """
    head, *rows = record.tables["terms"]
    us, source = head.index("us"), head.index("source")
    step_us = sum(row[us] for row in rows)
    delay_us = sum(row[-1] for row in record.tables.get(INTERVAL, [])[1:])
    off_us = sum(row[us] * SPREAD[row[source]] for row in rows)
    return (off_us + delay_us) / step_us if step_us else 0.0


def with_spread(record: Record) -> Record:
    """Returns a modelled step with its spread as a metric."""
    metric = Sample.exact(spread(record), "fraction of the step")
    return dataclasses.replace(record, metrics={**record.metrics, "spread": metric})
