"""A time, how it was found, and how far it may be off."""

import dataclasses

from stepgauge.spec.record import Record

# looked up at that very shape; between measured shapes; outside of them, at the nearest one's rate;
# of another device, by the ratio of published peaks; by a formula, or from another machine; its
# share of a block that was timed whole; by its bytes or operations, which say little of it
CALIBRATED, INTERPOLATED, EXTRAPOLATED, TRANSFERRED, ASSUMED, TIMED_WHOLE, UNTIMED = (
    "calibrated",
    "interpolated",
    "extrapolated",
    "transferred",
    "assumed",
    "timed whole",
    "untimed",
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Microseconds, and how they were found: one of the words above."""

    us: float
    source: str


# The fraction by which a time of each source may be off: steps of calibrated and interpolated
# shapes were within 3 and 5 % (docs/predict.md); the others are assumed. Batch and group norms, sums
# and pooling took 1.0 to 16 times as long as their bytes, in the median 3 (docs/log/2026-11-24-predicted-kinds.md).
SPREAD = {
    CALIBRATED: 0.03, INTERPOLATED: 0.05, EXTRAPOLATED: 0.15, TRANSFERRED: 0.2, ASSUMED: 0.3,
    TIMED_WHOLE: 0.03, UNTIMED: 2.0,
}  # fmt: skip
# How many times as long a host may take as the one that was calibrated: that of another machine, or
# of another hour (docs/log/2026-11-23-predicted-again.md).
SLOWER_HOST = 1.7
INTERVAL = "interval"  # a modelled record's table of what else a step may take, in microseconds


def spread(record: Record) -> float:
    """The fraction by which a modelled step may be off: of each term that of its source, by its
    time, and what a slower host would add to the step.
    """
    head, *rows = record.tables["terms"]
    us, source = head.index("us"), head.index("source")
    total = sum(row[us] for row in rows)
    more = sum(row[-1] for row in record.tables.get(INTERVAL, [])[1:])
    off = sum(row[us] * SPREAD[row[source]] for row in rows)
    return (off + more) / total if total else 0.0
