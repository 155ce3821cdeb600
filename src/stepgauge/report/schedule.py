"""Pipeline schedules in the terminal: a table of each rank's waiting time and memory, and a drawing.

The drawing has two lines per rank, for its actions and for what it holds. A step that is wider than
the terminal is drawn in several bands.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepgauge.cost.pipeline.timeline import Span, Timeline
from stepgauge.report.table import Table
from stepgauge.spec.plan.pipeline import Schedule
from stepgauge.spec.plan.pipeline.check import Checked

BAR = "─"  # fills an action after its name; a space means that the rank waits
EIGHTHS = " ▁▂▃▄▅▆▇█"
MAX_BANDS = 4
# The drawing is wide enough to name every action that lasts at least this fraction of the longest.
SHORTEST_NAMED = 1 / 8


def rank_table(timeline: Timeline, checked: Checked) -> Table:
    """Returns each rank's busy and waiting time, and its memory in pairs of micro-batch and stage."""
    rows = []
    for rank, busy in enumerate(timeline.busy_ms):
        waits, bubble = timeline.step_ms - busy, 100 * timeline.bubbles[rank]
        counts = checked.peak[rank], checked.in_flight[rank], checked.saved[rank]
        rows.append([rank, busy, waits, bubble, *counts])
    schedule = checked.schedule
    caption = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_micro_batches} micro-batches; step {timeline.step_ms:.4g} ms, "
        f"{timeline.over_ideal:.3f} × ideal"
    )
    head = ["rank", "busy", "waits", "bubble %", "most held", "in flight", "W pending"]
    notes = ["busy, waits: ms. most held, in flight, W pending: pairs of micro-batch and stage"]
    return Table(head, rows, names=1, caption=caption, formats={"most held": "g"}, notes=notes)


def legend(schedule: Schedule, *, has_names: bool) -> str:
    """Returns a line that explains the drawn actions."""
    forward = "F forward"
    if has_names:
        has_one_stage = schedule.num_stages == schedule.num_ranks
        forward = f"{'F3: forward of' if has_one_stage else '0F3: stage 0, forward,'} micro-batch 3"
    return f"{forward}; B backward, I of inputs, W of weights"


class Band(NamedTuple):
    """One part of the step. `actions` has (text, kinds) per rank, with one character per column; `held`
    has a line per rank.
    """

    begin_ms: float
    actions: list[tuple[str, str]]
    held: list[str]


class Drawing(NamedTuple):
    """`has_names`: actions are named by stage, kind and micro-batch, otherwise only by their kind."""

    bands: list[Band]
    has_names: bool


class _Row(NamedTuple):
    """A rank's actions. `bars` has for each the columns where it begins, where its name ends and where
    it ends.
    """

    text: str
    kinds: str
    bars: list[tuple[int, int, int]]


def drawing(timeline: Timeline, width: int) -> Drawing:
    """Returns the step in as many bands of `width` columns as the names of the actions need. If that
    exceeds MAX_BANDS, it is one band without names.
    """
    columns = max(width, math.ceil(timeline.step_ms * _columns_per_ms(timeline)))
    has_names = columns <= MAX_BANDS * width
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
    """Returns the scale at which every name fits into its action with one column to spare."""
    needed = [
        (span.end - span.start, len(name) + 1)
        for row in timeline.ranks
        for span, name in zip(row, action_names(row), strict=True)
    ]
    shortest_ms = SHORTEST_NAMED * max(ms for ms, _ in needed)
    return max(columns / ms for ms, columns in needed if ms and ms >= shortest_ms)


def action_names(row: Sequence[Span]) -> list[str]:
    """Returns a rank's actions as `schedule show` writes them, without the stage if it has only one."""
    actions = [span.action for span in row]
    if len({action.stage for action in actions}) > 1:
        return list(map(str, actions))
    return [f"{action.kind}{action.micro_batch}" for action in actions]


def _row(row: Sequence[Span], scale: float, columns: int, *, has_names: bool) -> _Row:
    text = kinds = ""
    bars = []
    for (action, start, end), full_name in zip(row, action_names(row), strict=True):
        begin = max(len(text), round(start * scale))
        room = max(0, round(end * scale) - begin)
        name = full_name if has_names else action.kind
        name = (name if len(name) <= room else action.kind)[:room]
        text = text.ljust(begin) + name.ljust(room, BAR)
        kinds = kinds.ljust(begin) + action.kind * room
        bars.append((begin, begin + len(name), begin + room))
    return _Row(text.ljust(columns), kinds.ljust(columns), bars)


def _cut(rows: Sequence[_Row], begin: int, width: int) -> int:
    """Returns where a band that begins at `begin` ends: if possible between two actions, else behind a
    name.
    """
    for until in (2, 1):
        for column in range(begin + width, begin + width // 2, -1):
            if not any(bar[0] < column < bar[until] for row in rows for bar in row.bars):
                return column
    return begin + width


def held_drawing(timeline: Timeline, width: int) -> list[str]:
    """Returns one line per rank of what it holds, in pairs of micro-batch and stage. A column is as
    high as the most that is held during its time, relative to the highest peak of all ranks.
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
    """Returns the highest level between two times, including the level at `begin`."""
    before = [held for ms, held in points if ms <= begin]
    return max([*before[-1:], *(held for ms, held in points if begin < ms < end)], default=0.0)
