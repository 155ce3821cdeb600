"""Figures that others published, as records, so that they stand in the same tables and plots as
ours.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepgauge.report.names import flatten
from stepgauge.report.table import Table
from stepgauge.report.views import plotted
from stepgauge.spec.record import Record, Sample


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a published figure is from. What was not noted when it was read is said to be unknown."""

    what: str
    hardware: str
    author: str | None = None
    title: str | None = None
    year: int | None = None
    place: str | None = None

    def __str__(self) -> str:
        where = {name: getattr(self, name) for name in ("author", "title", "year", "place")}
        known = [str(value) for value in where.values() if value is not None]
        unknown = ", ".join(name for name, value in where.items() if value is None)
        return ", ".join([self.what, *known, self.hardware]) + (
            f" ({unknown} unknown)" if unknown else ""
        )


_CS336 = "Stanford course CS336"
SOURCES: Mapping[str, Source] = {
    "S1": Source("write-up of assignment 2", "A100-class GPU", year=2024, place=_CS336),
    "S2": Source("repository of assignment 2", "A100", year=2025, place=_CS336),
    "S3": Source("lab report on distributed training", "8 GPUs, NVLink, 2 NUMA nodes"),
    "S5": Source("benchmarking notes", "laptop GPU of 8 GB"),
}
# Batch and context that the source's figures were measured with, where it says so.
CONDITIONS = {
    "S1": {"batch": 16, "context_length": 128},
    "S2": {"batch": 4, "context_length": 128},
    "S5": {},
}


def published(source: str, *, spec: dict[str, Any], **milliseconds: float) -> Record:
    """A record of a source: `forward=18.8` becomes forward_ms."""
    return Record(
        kind="step",
        spec={**CONDITIONS[source], **spec},
        metrics={
            f"{name}_ms": Sample.exact(float(value), "ms") for name, value in milliseconds.items()
        },
        provenance="published",
        source=source,
    )


def beside(records: Sequence[Record], theirs: Iterable[Record], figures: Sequence[str]) -> Table:
    """Each published row beside the one measured here of the same size, precision and compile; batch and context
    where there is one.

    Hardware and networks differ in detail, so that the table gives both figures and no verdict.
    Rows that were not run here give the published figure alone.
    """
    rows = []
    for their in theirs:
        ours = _nearest(records, their.spec)
        what = {name: str(their.spec[name]) for name in ("size", "precision", "compile")}
        rows += [
            {
                **what,
                "batch × context": load_of(ours),
                "phase": figure.removesuffix("_ms"),
                "here ms": plotted(ours, figure) if ours else None,
                "published ms": their.median(figure),
                "published batch × context": _load(their.spec),
                "source": their.source,
            }
            for figure in figures
            if figure in their.metrics
        ]
    note = "The networks may differ in detail; this one has SwiGLU"
    return beside_table(rows, here="here ms", note=note)


def beside_table(rows: Sequence[Mapping[str, Any]], *, here: str, note: str) -> Table:
    """Published figures, each row with its source, beside those in the column `here`; shown only
    when opened where nothing was measured here.
    """
    sources = dict.fromkeys(str(row["source"]) for row in rows)
    legend = "; ".join(f"{source}: {SOURCES[source]}" for source in sources)
    caption = f"Beside published figures. {legend}. {note}."
    return Table.from_rows(rows, caption=caption, folded=not any(row[here] for row in rows))


def load_of(ours: Record | None) -> str:
    """Batch and context of a row of ours."""
    return _load(flatten(ours.spec)) if ours else "not run here"


def _load(spec: Mapping[str, Any]) -> str:
    return f"{spec['batch']} × {spec['context_length']}" if "batch" in spec else "not stated"


def _nearest(records: Sequence[Record], wanted: Mapping[str, Any]) -> Record | None:
    """The row here with all that the published one states, else with all but batch and context."""
    good = [record for record in records if record.status == "ok"]
    for names in (list(wanted), [n for n in wanted if n not in ("batch", "context_length")]):
        for record in good:
            spec = flatten(record.spec)
            if all(spec.get(name) == wanted[name] for name in names):
                return record
    return None
