"""What the simulation of a layout's step returns."""

import dataclasses
from collections.abc import Mapping

from stepgauge.cost.pipeline.timeline import Timeline
from stepgauge.cost.streams.ledger import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """A simulated step.

    phases      ms per phase; forward and backward are one phase in a pipeline, which mixes them, and
                with accumulation
    rows        of the table of terms, for the rank that ends last
    timeline    of a pipeline
    busiest_ms  time in which the busiest rank of a pipeline computes
    busy        the share of forward and backward in which that rank computes
    bubble      the longest time that a rank waits for other stages, as a fraction of the step
    late_us     delay by a slower host
    """

    step_ms: float
    phases: Mapping[str, float]
    rows: Rows
    timeline: Timeline | None = None
    busiest_ms: float = 0.0
    busy: float = 1.0
    bubble: float = 0.0
    late_us: float = 0.0
