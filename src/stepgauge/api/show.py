"""Results that display themselves as tables in a notebook and at a Python prompt."""

import dataclasses
import difflib
import html
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from stepgauge.report.kinds import kind_of
from stepgauge.report.memory import summary_table
from stepgauge.report.names import flatten
from stepgauge.report.page import html_table
from stepgauge.report.table import Table, objects
from stepgauge.spec.record import Record


class Shown:
    """Displays its tables and notes as HTML in a notebook and as markdown at a prompt."""

    notes: Sequence[str] = ()

    def tables(self) -> list[Table]:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        tables = (
            f"<p>{html.escape(table.caption)}</p>{html_table(table)}" for table in self.tables()
        )
        return "".join([*tables, *(f"<p>{html.escape(note)}</p>" for note in self.notes)])

    def _repr_markdown_(self) -> str:
        return "\n".join([*(table.to("markdown") for table in self.tables()), *self.notes])

    __repr__ = _repr_markdown_


@dataclasses.dataclass(repr=False)
class Result(Shown):
    """The result of one measurement. result["step_ms"] is a metric's median.

    record      everything that was measured
    folder      a profile's folder, with its trace and analysis
    prediction  profile_memory's modelled record of the same spec
    details     tables with more than the record's row
    """

    record: Record
    folder: Path | None = None
    prediction: Record | None = None
    details: Sequence[Table] = ()

    def __getitem__(self, metric: str) -> float:
        """Returns the metric's median. Raises KeyError if the record has no such metric."""
        metrics = self.record.metrics
        if metric not in metrics:
            near = difflib.get_close_matches(metric, metrics, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(metrics)}"
            raise KeyError(f"no metric {metric!r}: {hint}")
        return metrics[metric].median

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The median of each metric by name. Names end with the unit, as in step_ms."""
        return {name: sample.median for name, sample in self.record.metrics.items()}

    def tables(self) -> list[Table]:
        records = [self.prediction, self.record] if self.prediction else [self.record]
        summary = summary_table if self.record.kind == "memory" else kind_of(self.record.kind).table
        return [summary(records), *self.details]


class Run(Shown, Sequence[Record]):
    """The records of a run, the latest for each spec."""

    def __init__(self, records: Sequence[Record]):
        self._records = list(records)

    @overload
    def __getitem__(self, place: int) -> Record: ...

    @overload
    def __getitem__(self, place: slice) -> list[Record]: ...

    def __getitem__(self, place: int | slice) -> Record | list[Record]:
        return self._records[place]

    def __len__(self) -> int:
        return len(self._records)

    def rows(self) -> list[dict[str, Any]]:
        """Returns a dict for each record: kind, spec fields, medians by metric, status and note."""
        return [
            {
                "kind": record.kind,
                **flatten(record.spec),
                **{name: sample.median for name, sample in record.metrics.items()},
                "status": record.status,
                "note": record.note,
                "provenance": record.provenance,
                "where": record.environment.get("device", ""),
                "created": record.created,
            }
            for record in self
        ]

    def to_pandas(self) -> Any:
        """Returns the rows as a pandas.DataFrame. Raises ImportError if pandas is not installed."""
        import pandas

        return pandas.DataFrame(self.rows())

    def tables(self) -> list[Table]:
        kinds = dict.fromkeys(record.kind for record in self)
        return [kind_of(kind).table([r for r in self if r.kind == kind]) for kind in kinds]


@dataclasses.dataclass(repr=False)
class Comparison(Shown):
    """The ratios of two runs' rows, and sentences about rows that only one run has."""

    table: Table
    notes: Sequence[str]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterates over the rows as dicts."""
        return iter(objects(self.table))

    def tables(self) -> list[Table]:
        return [self.table]
