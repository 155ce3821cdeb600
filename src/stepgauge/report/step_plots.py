"""Plots of measured steps: bars by phase, bars by two choices, communication over time."""

from collections.abc import Callable, Iterable, Sequence

from stepgauge.report.figure import (
    INK,
    MAX_BARS,
    SERIES,
    Series,
    canvas,
    grouped_bars,
    stacked_bars,
)
from stepgauge.report.names import labels
from stepgauge.report.page import Block, Plot
from stepgauge.report.views import plotted, record_table
from stepgauge.spec.analysis import TRACKS
from stepgauge.spec.record import Record
from stepgauge.spec.step import TRAINING_PHASES


def phase_bars(
    records: Sequence[Record],
    names: Sequence[str],
    caption: str,
    *,
    points: Series | None = None,
    scale_end: float | None = None,
) -> Plot:
    """Returns one bar per record, stacked from its phases. `points` and `scale_end` as in stacked_bars."""
    phases = {
        phase: [record.median(f"{phase}_ms") for record in records] for phase in TRAINING_PHASES
    }
    totals = [plotted(record, "step_ms") for record in records]
    unit = "ms per step (medians)"
    return Plot(
        stacked_bars(names, phases, totals=totals, unit=unit, points=points, scale_end=scale_end),
        caption,
    )


def phase_blocks(records: Sequence[Record]) -> list[Block]:
    """Returns bars of the phases, and the table."""
    shown = [record for record in records if record.status == "ok"][:MAX_BARS]
    bars = [phase_bars(shown, labels(shown), "Step time by phase.")] if shown else []
    return [*bars, record_table(records)]


def step_bars(
    records: Sequence[Record],
    caption: str,
    *,
    row: Callable[[Record], str],
    bar: Callable[[Record], str],
    bars: Iterable[str] = (),
    unit: str = "ms per step (median)",
) -> Plot:
    """Returns a cluster of bars for each result of `row`, with one bar for each result of `bar`.

    `bars` selects and orders the bars; by default all are drawn in the order of the records.
    """
    steps = {(row(record), bar(record)): plotted(record, "step_ms") for record in records}
    clusters = list(dict.fromkeys(name for name, _ in steps))
    present = list(dict.fromkeys(name for _, name in steps))
    drawn = [name for name in bars if name in present] if bars else present
    groups = {name: [steps.get((cluster, name)) for cluster in clusters] for name in drawn}
    return Plot(grouped_bars(clusters, groups, unit=unit), caption)


def overlap_tracks(records: Sequence[tuple[str, Record]]) -> str:
    """Returns an SVG with two tracks per record, communication and computation, on one time axis that
    begins with the step. Communication is hidden where both tracks are busy.
    """
    with canvas(7.2, 0.9 + 0.75 * len(records)) as (axes, output):
        labels: list[str] = []
        for position, (label, record) in enumerate(records):
            for track, colour in zip(TRACKS, SERIES, strict=False):
                starts, ends = (record.series[f"{track}_{edge}_ms"] for edge in ("start", "end"))
                spans = [(a, b - a) for a, b in zip(starts, ends, strict=True)]
                row = 2 * position + TRACKS.index(track)
                axes.broken_barh(
                    spans,
                    (row - 0.4, 0.8),
                    facecolors=colour,
                    label=track if position == 0 else None,
                )
                labels.append(f"{label}, {track}")
        axes.set_yticks(range(len(labels)), labels, color=INK)
        axes.invert_yaxis()
        axes.set_xlabel("ms of the step, rank 0")
        axes.grid(axis="y", visible=False)
    return output[0]
