"""What each rank of a pipeline schedule waits and holds, as a table."""

from stepgauge.cost.pipeline.timeline import Timeline
from stepgauge.report.table import Table
from stepgauge.spec.plan.pipeline.check import Checked


def rank_table(timeline: Timeline, checked: Checked) -> Table:
    """What each rank computes, waits and holds. `held` is in micro-batches of a stage."""
    rows = [
        [rank, busy, timeline.step_ms - busy, 100 * bubble, checked.peak[rank], in_flight, saved]
        for rank, (busy, bubble, in_flight, saved) in enumerate(
            zip(
                timeline.busy_ms,
                timeline.bubbles,
                checked.in_flight,
                checked.saved,
                strict=True,
            )
        )
    ]
    head = ["rank", "busy", "waits", "bubble %", "most held", "in flight", "W to come"]
    schedule = checked.schedule
    caption = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_micro_batches} micro-batches; step {timeline.step_ms:.4g}, "
        f"{timeline.over_ideal:.3f} of ideal"
    )
    return Table(head, rows, names=1, caption=caption)
