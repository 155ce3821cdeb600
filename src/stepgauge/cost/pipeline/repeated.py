"""The step of a long pipeline from schedules with fewer micro-batches.

After its first micro-batches a schedule repeats itself, and each further one adds the same time. It adds
at least the time in which a rank's host issues it: at first the devices still wait for other stages, and
a host that is a little slower than they are catches up with them many micro-batches later.
"""

import dataclasses
from typing import Self

from stepgauge.cost.pipeline.timeline import Durations, Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward and backward of all micro-batches, in the unit of the durations.

    step_ms    from the start to the end of the last computation
    busy_ms    for each rank, the time in which it computes
    issued_ms  for each rank, the time in which its host issues everything
    """

    step_ms: float
    busy_ms: list[float]
    issued_ms: list[float]

    @classmethod
    def of(cls, timeline: Timeline, taken: Durations) -> Self:
        """Returns a simulated pass."""
        issued_ms = [sum(taken.launch_of(span.action) for span in row) for row in timeline.ranks]
        return cls(step_ms=timeline.step_ms, busy_ms=timeline.busy_ms, issued_ms=issued_ms)

    def continued(self, fewer: Self, *, times: float) -> Self:
        """Returns the pass that is longer by `times` as many micro-batches as this one has more than
        `fewer`.
        """

        def totals(own: list[float], of_fewer: list[float]) -> list[float]:
            pairs = zip(own, of_fewer, strict=True)
            return [ms + times * (ms - fewer_ms) for ms, fewer_ms in pairs]

        issued_ms = totals(self.issued_ms, fewer.issued_ms)
        slowest_host_ms = max(issued_ms) - max(self.issued_ms)
        added_ms = max(times * (self.step_ms - fewer.step_ms), slowest_host_ms)
        return dataclasses.replace(
            self,
            step_ms=self.step_ms + added_ms,
            busy_ms=totals(self.busy_ms, fewer.busy_ms),
            issued_ms=issued_ms,
        )

    @property
    def busy(self) -> float:
        """The mean share in which a rank computes."""
        return sum(self.busy_ms) / len(self.busy_ms) / self.step_ms

    @property
    def waiting_ms(self) -> float:
        """The longest time in which a rank waits for other stages."""
        return self.step_ms - min(self.busy_ms)
