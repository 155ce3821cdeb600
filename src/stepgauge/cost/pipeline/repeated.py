"""The step of a long pipeline from schedules with fewer micro-batches.

After its first micro-batches a schedule repeats itself, and each further one adds the same time. It adds
at least the time in which a rank's host issues it: at first the devices still wait for other stages, and
a host that is a little slower than they are catches up with them many micro-batches later.
"""

import dataclasses
from typing import Self

from stepgauge.cost.pipeline.timeline import Durations, Timeline
from stepgauge.cost.rates.estimate import SLOWER_HOST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward and backward of all micro-batches, in the unit of the durations.

    step_ms    from the start to the end of the last computation
    busy_ms    for each rank, the time in which it computes
    issued_ms  for each rank, the time in which its host issues everything
    """

    num_micro_batches: int
    step_ms: float
    busy_ms: list[float]
    issued_ms: list[float]

    @classmethod
    def of(cls, timeline: Timeline, taken: Durations) -> Self:
        """Returns a simulated pass."""
        return cls(
            num_micro_batches=1 + max(span.action.micro_batch for span in timeline.ranks[0]),
            step_ms=timeline.step_ms,
            busy_ms=timeline.busy_ms,
            issued_ms=[sum(taken.launch_of(span.action) for span in row) for row in timeline.ranks],
        )

    def continued(self, fewer: Self, *, num_micro_batches: int) -> Self:
        """Returns the pass with more micro-batches. Each adds as much as one of those that `fewer` lacks."""
        added = num_micro_batches - self.num_micro_batches
        times = added / (self.num_micro_batches - fewer.num_micro_batches)

        def totals(own: list[float], of_fewer: list[float]) -> list[float]:
            pairs = zip(own, of_fewer, strict=True)
            return [ms + times * (ms - fewer_ms) for ms, fewer_ms in pairs]

        issued_ms = totals(self.issued_ms, fewer.issued_ms)
        slowest_host_ms = max(issued_ms) - max(self.issued_ms)
        added_ms = max(times * (self.step_ms - fewer.step_ms), slowest_host_ms)
        return type(self)(
            num_micro_batches=num_micro_batches,
            step_ms=self.step_ms + added_ms,
            busy_ms=totals(self.busy_ms, fewer.busy_ms),
            issued_ms=issued_ms,
        )

    @property
    def busy(self) -> float:
        """The share in which the busiest rank computes."""
        return max(self.busy_ms) / self.step_ms

    @property
    def waiting_ms(self) -> float:
        """The longest time in which a rank waits for other stages."""
        return self.step_ms - min(self.busy_ms)

    @property
    def late_ms(self) -> float:
        """The delay by a slower host."""
        return max(0.0, SLOWER_HOST * max(self.issued_ms) - self.step_ms)
