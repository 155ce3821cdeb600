"""Pipeline schedules over time: a line a rank in the terminal, predicted above measured in the
report, and what each rank waits and holds as a table.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from stepgauge.cost.timeline import Span, Timeline
from stepgauge.report.figure import FAINT, INK, SERIES, canvas
from stepgauge.report.table import Table
from stepgauge.spec.plan.pipeline.action import BACKWARD, FORWARD, INPUT, WEIGHT
from stepgauge.spec.plan.pipeline.check import Checked
from stepgauge.spec.plan.pipeline.text import parse
from stepgauge.spec.record import Record

KINDS: Mapping[str, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "gradient of input",
    WEIGHT: "gradient of weights",
}
# A bar is named by its micro-batch where it is at least this share of the drawing wide.
NAMED = 0.012


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


def timeline_of(record: Record) -> Timeline | None:
    """The timeline of a record, predicted or measured; None where it has none."""
    if "spans" not in record.tables:
        return None
    rows: dict[int, list[Span]] = {}
    for rank, action, start, end in record.tables["spans"][1:]:
        rows.setdefault(rank, []).append(Span(parse(action), start, end))
    return Timeline(tuple(tuple(rows[rank]) for rank in sorted(rows)))


def timelines_of(record: Record, records: Sequence[Record]) -> dict[str, Timeline]:
    """The step as it was predicted and as it ran, those that are among the records."""
    same = {other.provenance: timeline_of(other) for other in records if other.key == record.key}
    named = {"predicted": same.get("modelled"), "measured": same.get("measured")}
    return {name: timeline for name, timeline in named.items() if timeline}


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


def tracks(timelines: Mapping[str, Timeline]) -> str:
    """An SVG of several timelines by name above each other on one time axis, a track a rank."""
    count = sum(len(timeline.ranks) for timeline in timelines.values())
    longest = max(timeline.step_ms for timeline in timelines.values())
    labels, at = {}, 0.0
    with canvas(7.2, 0.9 + 0.36 * count + 0.3 * len(timelines)) as (axes, output):
        shown: set[str] = set()
        for name, timeline in timelines.items():
            axes.annotate(
                f"{name}: {timeline.step_ms:.4g} ms",
                (0, at - 0.62),
                color=FAINT,
                fontsize=8.5,
                va="bottom",
            )
            for rank, row in enumerate(timeline.ranks):
                _track(axes, row, at, longest, shown)
                labels[at] = f"rank {rank}"
                at += 1
            at += 0.9
        axes.set_yticks(list(labels), list(labels.values()), color=INK)
        axes.set_ylim(at - 1.3, -1.2)
        axes.set_xlim(0, longest)
        axes.set_xlabel("ms")
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0)
    return output[0]


def _track(axes: object, row: tuple[Span, ...], at: float, longest: float, shown: set[str]) -> None:
    for (kind, label), colour in zip(KINDS.items(), SERIES, strict=False):
        spans = [(span.start, span.end - span.start) for span in row if span.action.kind == kind]
        if spans:
            axes.broken_barh(  # type: ignore[attr-defined]
                spans,
                (at - 0.38, 0.76),
                facecolors=colour,
                edgecolor="none",
                linewidth=0,
                label=None if kind in shown else label,
            )
            shown.add(kind)
    for action, start, end in row:
        if end - start > NAMED * longest * max(1, math.ceil(math.log10(action.micro_batch + 1))):
            axes.annotate(  # type: ignore[attr-defined]
                str(action.micro_batch),
                ((start + end) / 2, at),
                ha="center",
                va="center",
                fontsize=6.5,
                color=INK,
            )
