"""Figures that others published, from published.json, as records beside ours.

A row of the file names its experiment and source, the fields of our spec that it was measured with,
as far as the source says them, and its figures by the names of our metrics.
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

UNITS = {"bytes": "bytes", "per_s": "", "ms": "ms"}  # by how a metric's name ends
SWIGLU = "The networks may differ in detail; this one has SwiGLU"
LOAD = ("batch", "context_length")
NEAR = 0.1  # sizes of messages that are compared: 10^6 bytes with 2^20


@functools.cache
def _file() -> Any:
    file = importlib.resources.files(__package__) / "published.json"
    return json.loads(file.read_text(encoding="utf-8"))


def legend(sources: Sequence[str]) -> str:
    """What each source is; what was not noted when it was read is said to be unknown."""
    return "; ".join(f"{name}: {_file()['sources'][name]}" for name in dict.fromkeys(sources))


def published(experiment: str) -> list[Record]:
    """The published rows of an experiment."""
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


def beside(experiment: str, records: Sequence[Record], note: str = "Hardware differs") -> Table:
    """Each published row beside the nearest one measured here; alone where there is none. Shown only
    when opened where nothing was measured here.

    Hardware and networks differ in detail, so that the table gives both figures and no verdict.
    """
    theirs = published(experiment)
    fields = [name for name in differing_fields(theirs) if name not in LOAD]
    pairs = [(their, nearest(records, their.spec)) for their in theirs]
    is_beside = any(plotted(ours, name) for their, ours in pairs if ours for name in their.metrics)
    rows = []
    for their, ours in pairs:
        row: dict[str, Any] = {
            "row": " ".join(f"{n}={their.spec[n]}" for n in fields if n in their.spec)
        }
        for metric, sample in their.metrics.items():
            name, here = heading(metric, sample.unit), plotted(ours, metric) if ours else None
            row |= {f"here {name}": scaled(here, sample.unit)} if is_beside else {}
            row |= {f"published {name}": scaled(sample.median, sample.unit)}
        if set(LOAD) <= their.spec.keys():
            row |= {"batch × context here": _load(ours)} if is_beside else {}
            row |= {"published batch × context": _load(their)}
        rows.append(row | {"source": their.source})
    head = (
        "Beside published figures" if is_beside else "Published figures; nothing like them ran here"
    )
    caption = f"{head}. {legend([row['source'] for row in rows])}. {note}."
    return Table.from_rows(rows, caption=caption, names=1, folded=not is_beside)


def _load(record: Record | None) -> str:
    """Batch and context of a row."""
    if record is None:
        return "not run here"
    spec = flatten(record.spec)
    return " × ".join(str(spec[name]) for name in LOAD) if spec.keys() >= set(LOAD) else ""


def nearest(records: Sequence[Record], wanted: Mapping[str, Any]) -> Record | None:
    """The row here with all that the published one states, else with all but batch and context."""
    good = [(flatten(r.spec), r) for r in records if r.status == "ok"]
    for names in (list(wanted), [name for name in wanted if name not in LOAD]):
        for spec, record in good:
            if all(_alike(name, spec.get(name), wanted[name]) for name in names):
                return record
    return None


def _alike(name: str, ours: Any, theirs: Any) -> bool:
    if name == "size_bytes":
        return abs((ours or 0) / theirs - 1) < NEAR
    return bool(ours == theirs)
