"""A time, its source, and how far it may be off."""

import dataclasses
import math

from stepgauge.spec.record import Record, Sample

# How a time was found:
CALIBRATED = "calibrated"  # measured at exactly these sizes
INTERPOLATED = "interpolated"  # between measured sizes
EXTRAPOLATED = "extrapolated"  # outside of the measured sizes, at the rate of the nearest
TRANSFERRED = "transferred"  # from another device, by the ratio of published peaks
ASSUMED = "assumed"  # by a formula, or from another machine
TIMED_WHOLE = "timed whole"  # a share of the time of a whole block
UNTIMED = "untimed"  # by bytes or FLOPs, which say little about this operation

# By source, the fraction by which a time may be off. Steps whose operations were calibrated or
# interpolated were within 3 and 5 % (docs/predict.md). The others are assumed. Batch and group norms,
# sums and pooling took 1.0 to 16 times as long as their bytes, 3 times in the median
# (docs/log/2026-11-24-predicted-kinds.md).
SPREAD = {
    CALIBRATED: 0.03, INTERPOLATED: 0.05, EXTRAPOLATED: 0.15, TRANSFERRED: 0.2, ASSUMED: 0.3,
    TIMED_WHOLE: 0.03, UNTIMED: 2.0,
}  # fmt: skip
# Within NEAR times the timed sizes, as in the committed steps, SPREAD is not widened. Farther away, larger
# operations are predicted too long and smaller ones far too short, since launches and latency do
# not shrink (docs/log/2026-11-28-far-extrapolation.md).
NEAR, LARGER_PER_DOUBLING = 32.0, 0.17
# Other work only lengthens a time that it disturbs, and all of the time may be due to it.
DISTURBED = 1.0
# How many times as slow as the calibrated host another one may be, or the same one at another hour
# (docs/log/2026-11-23-predicted-again.md).
SLOWER_HOST = 1.7
# Name of a modelled record's table with other delays that the step may have, in microseconds.
INTERVAL = "interval"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A time and its source.

    us          microseconds
    source      one of the words above
    times_away  if extrapolated, how many times as large or as small as the nearest timed sizes: the
                product over all sizes
    smaller     if extrapolated, the operation is smaller than the nearest timed one
    disturbed   other work took cores while the times that it rests on were measured
    """

    us: float
    source: str
    times_away: float = 1.0
    smaller: bool = False
    disturbed: bool = False

    @property
    def spread(self) -> float:
        """The fraction by which the time may be off.

        A smaller operation may take as long as one NEAR times as small as the nearest timed one.
        """
        far = max(1.0, self.times_away / NEAR)
        added = far - 1 if self.smaller else LARGER_PER_DOUBLING * math.log2(far)
        return max(SPREAD[self.source] + added, DISTURBED if self.disturbed else 0.0)

    def scaled(self, factor: float) -> "Estimate":
        return dataclasses.replace(self, us=self.us * factor)


def spread(record: Record) -> float:
    """Returns the fraction by which a modelled step may be off.

    It is the mean spread of the terms, weighted by their time, plus the delay by a slower host.
    """
    head, *rows = record.tables["terms"]
    terms = [dict(zip(head, row, strict=True)) for row in rows]
    step_us = sum(term["us"] for term in terms)
    delay_us = sum(row[-1] for row in record.tables.get(INTERVAL, [])[1:])
    # older records have no spread of their own
    off_us = sum(term["us"] * term.get("spread", SPREAD[term["source"]]) for term in terms)
    return (off_us + delay_us) / step_us if step_us else 0.0


def with_spread(record: Record) -> Record:
    """Returns a modelled step with its spread as a metric."""
    metric = Sample.exact(spread(record), "fraction of the step")
    return dataclasses.replace(record, metrics={**record.metrics, "spread": metric})
