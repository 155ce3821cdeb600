"""Plots of pipeline steps: when each action ran and what each rank held, with the predicted step above
the measured one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepgauge.cost.pipeline.timeline import Span, Timeline
from stepgauge.report.figure import DASHED, FAINT, INK, SERIES, canvas, described, short
from stepgauge.report.names import labels
from stepgauge.report.numbers import size_unit
from stepgauge.report.page import Block, Plot, Text
from stepgauge.report.schedule import action_names
from stepgauge.spec.plan.pipeline.action import BACKWARD, FORWARD, INPUT, WEIGHT
from stepgauge.spec.plan.pipeline.text import parse
from stepgauge.spec.predictions import pair_steps
from stepgauge.spec.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS: Mapping[str, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "gradient of input",
    WEIGHT: "gradient of weights",
}
COLOURS = dict(zip(KINDS, SERIES, strict=False))
HELD_COLOUR = SERIES[len(KINDS)]
COUNTED = "pairs of micro-batch and stage"
# Points of the names in bars. Widths as fractions of them, in a wide font: a digit and the kinds.
NAME_POINTS, MARGIN_POINTS = 6.5, 1.0
DIGIT = 0.64
LETTERS = {FORWARD: 0.58, BACKWARD: 0.69, INPUT: 0.3, WEIGHT: 0.99}
# Opacity of bars, of a rank's first stage and its last: names in them stay readable on light and dark
# pages.
OPACITY, LAST_OPACITY = 0.65, 0.3
# Widths in inches on a page and, at most, in a file, where readers scroll; the axes' share of them.
PAGE_INCHES, MAX_INCHES, AXES = 7.2, 60.0, 0.775
# A file is wide enough to name every action that lasts at least this fraction of the longest.
SHORTEST_NAMED = 1 / 3
# Heights in rows: a rank's bars, its memory curve below them, and both with a gap.
BAR, HELD, RANK = 0.76, 0.8, 2.0
ROW_INCHES = 0.26
MAX_PLOTS = 8  # on one page

Levels = Sequence[Sequence[tuple[float, float]]]


@dataclasses.dataclass(frozen=True)
class Step:
    """When each action of a step ran, and what each rank held, predicted or measured.

    levels     for each rank, points of (ms, what it holds from then on)
    peaks      the peak of each rank; the predicted one if there is a prediction
    unit       the unit of levels and peaks
    which      which of the measured steps it is, and which part, if it is not a whole one
    median_ms  the median of all measured steps
    """

    timeline: Timeline
    levels: Levels
    peaks: Sequence[float]
    unit: str = COUNTED
    which: str = ""
    median_ms: float | None = None

    @classmethod
    def counted(cls, timeline: Timeline) -> "Step":
        """Returns a step whose memory is counted in pairs of micro-batch and stage."""
        levels = timeline.held({})
        return cls(timeline, levels, [_highest(points) for points in levels])

    def title(self, name: str) -> str:
        """Returns what a picture says above the step."""
        named = f"{name}, {self.which}" if self.which else name
        median = "" if self.median_ms is None else f" (median {self.median_ms:.4g})"
        return f"{named}: {self.timeline.step_ms:.4g} ms{median}"


def steps_of(record: Record, run: Sequence[Record]) -> dict[str, Step]:
    """Returns the record's "predicted" and "measured" step, as far as the run has them. Memory is in
    bytes if both have bytes, else in micro-batches.
    """
    both = [record]
    for row in pair_steps(run):
        if row.record is record and row.prediction:
            both.append(row.prediction)
    timed = {each.provenance: each for each in both if "spans" in each.tables}
    names = {"modelled": "predicted", "measured": "measured"}
    by_name = {names[provenance]: timed[provenance] for provenance in names if provenance in timed}
    if all("held" in each.tables for each in by_name.values()):
        steps = _in_bytes(by_name)
    else:
        steps = {name: Step.counted(timeline_of(each)) for name, each in by_name.items()}
    return {name: _explained(step, by_name[name]) for name, step in steps.items()}


def _explained(step: Step, record: Record) -> Step:
    """Adds which step of the record the timeline is, and the median next to which tables show it. A
    layout's timeline has no optimizer; with accumulation it is the last pass of several.
    """
    is_part = "forward_and_backward_ms" in record.metrics
    part = "forward and backward" if is_part else ""
    if record.provenance != "measured":
        return dataclasses.replace(step, which=part)
    is_one_of_several = record.spec.get("accumulation", 1) > 1
    metric = "forward_and_backward_ms" if is_part else "step_ms"
    median = None if is_one_of_several else record.median(metric)
    return dataclasses.replace(step, which=f"last {part or 'step'}", median_ms=median)


def _in_bytes(by_name: Mapping[str, Record]) -> dict[str, Step]:
    """Returns the steps with memory in one unit of bytes. The peaks are those of the first step, which
    is the predicted one if there is one.
    """
    if not by_name:
        return {}
    levels = {name: _levels_of(record) for name, record in by_name.items()}
    unit = size_unit([_highest(points) for ranks in levels.values() for points in ranks])
    first = next(iter(by_name.values()))
    peaks = [peak / unit.bytes for peak in first.series["rank_peak_bytes"]]
    steps = {}
    for name, record in by_name.items():
        scaled = [[(ms, held / unit.bytes) for ms, held in points] for points in levels[name]]
        steps[name] = Step(timeline_of(record), scaled, peaks, unit.text)
    return steps


def timeline_of(record: Record) -> Timeline:
    rows: dict[int, list[Span]] = {}
    for rank, action, start, end in record.tables["spans"][1:]:
        rows.setdefault(rank, []).append(Span(parse(action), start, end))
    return Timeline(tuple(tuple(rows[rank]) for rank in sorted(rows)))


def _levels_of(record: Record) -> Levels:
    rows: dict[int, list[tuple[float, float]]] = {}
    for rank, ms, held in record.tables["held"][1:]:
        rows.setdefault(rank, []).append((ms, held))
    return [rows[rank] for rank in sorted(rows)]


def _highest(points: Sequence[tuple[float, float]]) -> float:
    return max(held for _, held in points)


def step_blocks(records: Sequence[Record], run: Sequence[Record]) -> list[Block]:
    """Returns a plot for each of the first records with a timeline. `run` has their predictions."""
    timed = [record for record in records if "spans" in record.tables]
    plots: list[Block] = [
        _plot(name, steps_of(record, run))
        for name, record in list(zip(labels(timed), timed, strict=True))[:MAX_PLOTS]
    ]
    more = len(timed) - len(plots)
    return [*plots, Text(f"{more} more steps are not drawn.")] if more else plots


def _plot(name: str, steps: Mapping[str, Step]) -> Plot:
    caption = f"{name}: the actions of each rank, and below them the memory that it holds."
    last = " The measured actions are those of the last step." if "measured" in steps else ""
    return Plot(tracks(steps), caption + last)


def wide_tracks(steps: Mapping[str, Step]) -> str:
    """Returns `tracks` for a file: so wide that most actions have room for their names."""
    rows = [row for step in steps.values() for row in step.timeline.ranks]
    needed = [
        (span.end - span.start, _points(name))
        for row in rows
        for span, name in zip(row, action_names(row), strict=True)
    ]
    shortest_ms = SHORTEST_NAMED * max(ms for ms, _ in needed)
    points_per_ms = max(points / ms for ms, points in needed if ms and ms >= shortest_ms)
    longest_ms = max(step.timeline.step_ms for step in steps.values())
    inches = points_per_ms * longest_ms / 72 / AXES
    return tracks(steps, min(MAX_INCHES, max(PAGE_INCHES, inches)))


def tracks(steps: Mapping[str, Step], inches: float = PAGE_INCHES) -> str:
    """Returns an SVG of the steps, one below the other on one time axis: the actions of each rank, what
    it holds, and its peak. The peak includes temporaries within an action, the curve does not.
    """
    ranks = sum(len(step.levels) for step in steps.values())
    longest = max(step.timeline.step_ms for step in steps.values())
    most = max(max(*step.peaks, *map(_highest, step.levels)) for step in steps.values())
    ticks, at = {}, 0.0
    with canvas(inches, 0.9 + ROW_INCHES * (RANK * ranks + len(steps))) as (axes, output):
        for name, step in steps.items():
            axes.annotate(step.title(name), (0, at - 0.55), color=FAINT, fontsize=8.5, va="bottom")
            for rank, row in enumerate(step.timeline.ranks):
                _bars(axes, row, at, longest)
                base = at + BAR / 2 + HELD + 0.1
                points = [*step.levels[rank], (step.timeline.step_ms, step.levels[rank][-1][1])]
                times, held = zip(*points, strict=True)
                _held(axes, times, [level / most for level in held], base)
                _peak(axes, step.peaks[rank], most, base, longest)
                ticks[at] = f"rank {rank}"
                at += RANK
            at += 0.9
        axes.set_yticks(list(ticks), list(ticks.values()), color=INK)
        axes.set_ylim(at - 1.2, -1.2)
        axes.set_xlim(0, longest)
        axes.set_xlabel("ms")
        axes.grid(axis="y", visible=False)
        unit = next(iter(steps.values())).unit
        _legend(axes, steps, unit)
    texts = [f"{step.title(name)}, peak of each rank in {unit}: "
             f"{', '.join(short(_highest(points)) for points in step.levels)}"
             for name, step in steps.items()]  # fmt: skip
    return described(output[0], f"{'; '.join(texts)}.")


def _bars(axes: "Axes", row: Sequence[Span], at: float, longest: float) -> None:
    """Draws a rank's actions: the kind is the colour, the stage the shade. An action is named by what
    fits of its name and its micro-batch.
    """
    shades = _shades(row)
    bars: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for (stage, kind, _), start, end in row:
        bars.setdefault((kind, stage), []).append((start, end - start))
    for (kind, stage), spans in bars.items():
        axes.broken_barh(spans, (at - BAR / 2, BAR), facecolors=COLOURS[kind],
                         alpha=shades[stage], linewidth=0)  # fmt: skip
    points_per_ms = axes.get_window_extent().width * 72 / axes.figure.dpi / longest
    for (action, start, end), full_name in zip(row, action_names(row), strict=True):
        room = (end - start) * points_per_ms
        names = (full_name, str(action.micro_batch))
        if name := next((name for name in names if _points(name) <= room), ""):
            axes.annotate(name, ((start + end) / 2, at), ha="center", va="center",
                          fontsize=NAME_POINTS, color=INK)  # fmt: skip


def _shades(row: Sequence[Span]) -> dict[int, float]:
    """Returns the opacity of each of a rank's stages: the later, the fainter."""
    stages = sorted({span.action.stage for span in row})
    step = (OPACITY - LAST_OPACITY) / max(1, len(stages) - 1)
    return {stage: OPACITY - step * place for place, stage in enumerate(stages)}


def _points(name: str) -> float:
    """Returns the width that the name of an action needs in its bar."""
    return MARGIN_POINTS + NAME_POINTS * sum(LETTERS.get(letter, DIGIT) for letter in name)


def _held(axes: "Axes", times: Sequence[float], shares: Sequence[float], base: float) -> None:
    """Draws a filled curve above `base`. The axis points down."""
    heights = [base - HELD * share for share in shares]
    axes.fill_between(times, base, heights, step="post", color=HELD_COLOUR, linewidth=0, alpha=0.7)


def _peak(axes: "Axes", peak: float, most: float, base: float, longest: float) -> None:
    height = base - HELD * peak / most
    axes.plot([0, longest], [height, height], color=INK, linewidth=0.8, linestyle=DASHED)
    axes.annotate(short(peak), (longest, height), (4, 0), textcoords="offset points",
                  va="center", fontsize=7.5, color=INK, annotation_clip=False)  # fmt: skip


def _legend(axes: "Axes", steps: Mapping[str, Step], unit: str) -> None:
    """Adds a legend of the kinds of action that occur, the shades, the memory held and its peak."""
    rows = [row for step in steps.values() for row in step.timeline.ranks]
    occurring = {span.action.kind for row in rows for span in row}
    for kind in (kind for kind in KINDS if kind in occurring):
        axes.broken_barh(
            [], (0, 0), facecolors=COLOURS[kind], alpha=OPACITY, label=f"{kind}, {KINDS[kind]}"
        )
    if any(len(_shades(row)) > 1 for row in rows):
        label = "fainter: the rank's later stages"
        axes.broken_barh([], (0, 0), facecolors=FAINT, alpha=LAST_OPACITY, label=label)
    axes.fill_between([], [], color=HELD_COLOUR, linewidth=0, alpha=0.7, label=f"held, {unit}")
    peak = "measured peak" if list(steps) == ["measured"] else "predicted peak"
    axes.plot([], [], color=INK, linewidth=0.8, linestyle=DASHED, label=peak)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0)
