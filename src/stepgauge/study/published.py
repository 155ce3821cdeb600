"""Compares our records with figures that others published, which are in published.json.

A row of the file has its experiment, its source, the spec fields that the source states, and its
figures by the names of our metrics.
"""

import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.report.names import differing_fields, flatten
from stepgauge.report.numbers import heading, scaled
from stepgauge.report.table import Table
from stepgauge.report.views import plotted
from stepgauge.spec.record import Record, Sample

UNITS = {"bytes": "bytes", "per_s": "", "ms": "ms"}  # by the end of a metric's name
SWIGLU = "The networks may differ in details; the one here has SwiGLU"
LOAD = ("batch", "context_length")
NEAR = 0.1  # relative difference of message sizes that are compared, such as 10^6 bytes and 2^20


@functools.cache
def _file() -> Any:
    file = importlib.resources.files(__package__) / "published.json"
    return json.loads(file.read_text(encoding="utf-8"))


def legend(sources: Sequence[str]) -> str:
    """Returns a description of each source."""
    return "; ".join(f"{name}: {_file()['sources'][name]}" for name in dict.fromkeys(sources))


def published(experiment: str) -> list[Record]:
    """Returns the published rows of an experiment as records."""
    return [
        Record(
            kind="step",
            spec=row["spec"],
            metrics={n: Sample.exact(float(v), _unit(n)) for n, v in row["figures"].items()},
            provenance="published",
            source=row["source"],
        )
        for row in _file()["rows"]
        if row["experiment"] == experiment
    ]


def _unit(metric: str) -> str:
    return next(unit for end, unit in UNITS.items() if metric.endswith(end))


def comparison(experiment: str, records: Sequence[Record], note: str = "Hardware differs") -> Table:
    """Returns a table of each published row and the most similar one measured here. If there is none
    for any row, the table is folded.

    Hardware and networks differ in details, so the table gives both figures without a verdict.
    """
    rows_published = published(experiment)
    fields = [name for name in differing_fields(rows_published) if name not in LOAD]
    pairs = [(other, nearest(records, other.spec)) for other in rows_published]
    has_ours = any(plotted(ours, name) for other, ours in pairs if ours for name in other.metrics)
    rows = []
    for other, ours in pairs:
        row: dict[str, Any] = {
            "row": " ".join(f"{n}={other.spec[n]}" for n in fields if n in other.spec)
        }
        for metric, sample in other.metrics.items():
            name, here = heading(metric, sample.unit), plotted(ours, metric) if ours else None
            row |= {f"here {name}": scaled(here, sample.unit)} if has_ours else {}
            row |= {f"published {name}": scaled(sample.median, sample.unit)}
        if set(LOAD) <= other.spec.keys():
            row |= {"batch × context here": _load(ours)} if has_ours else {}
            row |= {"published batch × context": _load(other)}
        rows.append(row | {"source": other.source})
    head = "Comparison with published figures" if has_ours else (
        "Published figures (nothing comparable was measured here)")  # fmt: skip
    caption = f"{head}. {legend([row['source'] for row in rows])}. {note}."
    return Table.from_rows(rows, caption=caption, names=1, folded=not has_ours)


def _load(record: Record | None) -> str:
    """Returns "batch × context" of a row."""
    if record is None:
        return "not run here"
    spec = flatten(record.spec)
    return " × ".join(str(spec[name]) for name in LOAD) if spec.keys() >= set(LOAD) else ""


def nearest(records: Sequence[Record], wanted: Mapping[str, Any]) -> Record | None:
    """Returns our row that agrees with all wanted fields, else one that agrees in all except batch and
    context.
    """
    good = [(flatten(r.spec), r) for r in records if r.status == "ok"]
    for names in (list(wanted), [name for name in wanted if name not in LOAD]):
        for spec, record in good:
            if all(_agrees(name, spec.get(name), wanted[name]) for name in names):
                return record
    return None


def _agrees(name: str, ours: Any, published: Any) -> bool:
    if name == "size_bytes":
        return abs((ours or 0) / published - 1) < NEAR
    return bool(ours == published)
