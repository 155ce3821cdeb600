"""Pipeline schedules in the terminal: two lines a rank, and what each rank waits and holds as a
table.
"""

from collections.abc import Iterator, Sequence

from stepgauge.cost.timeline import Span, Timeline
from stepgauge.report.table import Table
from stepgauge.spec.plan.pipeline.check import Checked

EIGHTHS = " ▁▂▃▄▅▆▇█"


def drawing(timeline: Timeline, width: int) -> list[list[tuple[str, str]]]:
    """A line a rank of (text, kind) over `width` characters; kind is empty where the rank waits.

    A bar begins with its kind, and its micro-batch where there is room.
    """
    scale = width / timeline.step_ms
    return [list(_bars(row, scale)) for row in timeline.ranks]


def _bars(row: tuple[Span, ...], scale: float) -> Iterator[tuple[str, str]]:
    at = 0
    for action, start, end in row:
        begin, stop = max(at, round(start * scale)), round(end * scale)
        if begin > at:
            yield " " * (begin - at), ""
        room = max(0, stop - begin)
        text = f"{action.kind}{action.micro_batch}"
        text = text if len(text) <= room else action.kind
        yield text[:room].ljust(room), action.kind
        at = begin + room


def held_drawing(timeline: Timeline, width: int) -> list[str]:
    """A line a rank of what it holds, in micro-batches of a stage: a column is as high as the most
    that is held in its time, of the most that any rank ever holds.
    """
    ranks = timeline.held({})
    most = max(held for points in ranks for _, held in points)
    column_ms = timeline.step_ms / width
    lines = []
    for points in ranks:
        levels = [_most_within(points, n * column_ms, (n + 1) * column_ms) for n in range(width)]
        eighths = [round(8 * level / most) or bool(level) for level in levels]
        lines.append("".join(EIGHTHS[eighth] for eighth in eighths))
    return lines


def _most_within(points: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """The highest level between two times; the first begins before, the last ends after."""
    before = [held for ms, held in points if ms <= begin]
    return max([*before[-1:], *(held for ms, held in points if begin < ms < end)], default=0.0)


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
