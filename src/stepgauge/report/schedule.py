"""Pipeline schedules in the terminal: a table of what each rank waits and holds, and a drawing with
two lines a rank, what it computes and what it holds, in bands below each other where the step is
wider than the page.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepgauge.cost.pipeline.timeline import Span, Timeline
from stepgauge.report.table import Table
from stepgauge.spec.plan.pipeline.action import Action
from stepgauge.spec.plan.pipeline.check import Checked

BAR = "─"  # of an action behind its name; a space is where a rank waits
EIGHTHS = " ▁▂▃▄▅▆▇█"
MOST_BANDS = 4
# An action may be so many times shorter than the longest, and has its name.
SHORTEST_NAMED = 1 / 8


def rank_table(timeline: Timeline, checked: Checked) -> Table:
    """What each rank computes, waits and holds. `held` is in micro-batches of a stage."""
    rows = []
    for rank, busy in enumerate(timeline.busy_ms):
        waits, bubble = timeline.step_ms - busy, 100 * timeline.bubbles[rank]
        counts = checked.peak[rank], checked.in_flight[rank], checked.saved[rank]
        rows.append([rank, busy, waits, bubble, *counts])
    schedule = checked.schedule
    caption = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_micro_batches} micro-batches; step {timeline.step_ms:.4g}, "
        f"{timeline.over_ideal:.3f} of ideal"
    )
    head = ["rank", "busy", "waits", "bubble %", "most held", "in flight", "W to come"]
    return Table(head, rows, names=1, caption=caption)


class Band(NamedTuple):
    """A piece of the step: of each rank (text, kinds), a character a column, and what it holds."""

    begin_ms: float
    actions: list[tuple[str, str]]
    held: list[str]


class Drawing(NamedTuple):
    """`has_names`: actions are named by stage, kind and micro-batch, else by their kind alone."""

    bands: list[Band]
    has_names: bool


class _Row(NamedTuple):
    """A rank's actions; `bars` are the columns where each begins, and its name and itself end."""

    text: str
    kinds: str
    bars: list[tuple[int, int, int]]


def drawing(timeline: Timeline, width: int) -> Drawing:
    """The step over as many bands of `width` columns as the names of its actions need. They are left
    out, and there is one band, where that would be over MOST_BANDS.
    """
    columns = max(width, math.ceil(timeline.step_ms * _columns_per_ms(timeline)))
    has_names = columns <= MOST_BANDS * width
    columns = columns if has_names else width
    scale = columns / timeline.step_ms
    rows = [_row(row, scale, columns, has_names=has_names) for row in timeline.ranks]
    held = held_drawing(timeline, columns)
    bands, begin = [], 0
    while begin < columns:
        end = min(columns, _cut(rows, begin, width))
        actions = [(row.text[begin:end], row.kinds[begin:end]) for row in rows]
        bands.append(Band(begin / scale, actions, [line[begin:end] for line in held]))
        begin = end
    return Drawing(bands, has_names)


def _columns_per_ms(timeline: Timeline) -> float:
    """So many that names have room, and a column of the bar behind them."""
    needed = [
        (span.end - span.start, len(_name(span.action, row)) + 1)
        for row in timeline.ranks
        for span in row
    ]
    least_ms = SHORTEST_NAMED * max(ms for ms, _ in needed)
    return max(columns / ms for ms, columns in needed if ms and ms >= least_ms)


def _name(action: Action, row: Sequence[Span]) -> str:
    """As `schedule show` writes it, but without the stage where the rank has one."""
    has_one = all(span.action.stage == action.stage for span in row)
    return str(action).removeprefix(str(action.stage)) if has_one else str(action)


def _row(row: Sequence[Span], scale: float, columns: int, *, has_names: bool) -> _Row:
    text = kinds = ""
    bars = []
    for action, start, end in row:
        begin = max(len(text), round(start * scale))
        room = max(0, round(end * scale) - begin)
        name = _name(action, row) if has_names else action.kind
        name = (name if len(name) <= room else action.kind)[:room]
        text = text.ljust(begin) + name.ljust(room, BAR)
        kinds = kinds.ljust(begin) + action.kind * room
        bars.append((begin, begin + len(name), begin + room))
    return _Row(text.ljust(columns), kinds.ljust(columns), bars)


def _cut(rows: Sequence[_Row], begin: int, width: int) -> int:
    """Where a band ends that begins there: it cuts no bar, else no name, where that is possible."""
    for until in (2, 1):
        for column in range(begin + width, begin + width // 2, -1):
            if not any(bar[0] < column < bar[until] for row in rows for bar in row.bars):
                return column
    return begin + width


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
