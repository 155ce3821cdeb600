"""When ranks communicated and computed: traced steps drawn above each other."""

from collections.abc import Sequence

from stepgauge.report.figure import INK, SERIES, canvas
from stepgauge.spec.record import Record

TRACKS = ("computation", "communication")


def overlap_tracks(records: Sequence[tuple[str, Record]]) -> str:
    """Two tracks a record on one time axis from the step's begin: what meets is hidden."""
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
