"""Records and tables that show themselves in a notebook, at a prompt and in print."""

import dataclasses
import difflib
import html
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from stepgauge.report.kinds import table_of
from stepgauge.report.memory import summary_table
from stepgauge.report.names import flatten
from stepgauge.report.page import html_table
from stepgauge.report.table import Table, objects
from stepgauge.spec.record import Record


class Shown:
    """Tables as HTML in a notebook and as markdown at a prompt."""

    def tables(self) -> list[Table]:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return "".join(
            f"<p>{html.escape(table.caption)}</p>{html_table(table)}" for table in self.tables()
        )

    def _repr_markdown_(self) -> str:
        return "\n".join(table.to("markdown") for table in self.tables())

    __repr__ = _repr_markdown_


@dataclasses.dataclass(repr=False)
class Result(Shown):
    """One record: result["step_ms"] is the median of a metric, `result.record` has all of it.

    folder      where files lie beside it: a profile's trace and analysis
    prediction  the modelled record of the same spec, of profile_memory
    details     tables that say more than the record's row
    """

    record: Record
    folder: Path | None = None
    prediction: Record | None = None
    details: Sequence[Table] = ()

    def __getitem__(self, metric: str) -> float:
        """The median. Raises KeyError for a metric that the record does not have."""
        known = self.record.metrics
        if metric not in known:
            near = difflib.get_close_matches(metric, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise KeyError(f"no metric {metric!r}: {hint}")
        return known[metric].median

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Medians by name; names carry their unit, as step_ms does."""
        return {name: sample.median for name, sample in self.record.metrics.items()}

    def tables(self) -> list[Table]:
        records = [self.prediction, self.record] if self.prediction else [self.record]
        summary = summary_table if self.record.kind == "memory" else table_of(self.record.kind)
        return [summary(records), *self.details]


class Run(Shown, Sequence[Record]):
    """The records of a run, the last of each thing asked."""

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
        """One dict a record: kind, the fields of its spec, medians by metric, status and note."""
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
        """The rows as a pandas.DataFrame. Raises ImportError where pandas is not installed."""
        import pandas

        return pandas.DataFrame(self.rows())

    def tables(self) -> list[Table]:
        kinds = dict.fromkeys(record.kind for record in self)
        return [table_of(kind)([r for r in self if r.kind == kind]) for kind in kinds]


@dataclasses.dataclass(repr=False)
class Comparison(Shown):
    """The ratios of two runs, and in sentences what only one of them has."""

    table: Table
    alone: Sequence[str]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows as dicts."""
        return iter(objects(self.table))

    def tables(self) -> list[Table]:
        return [self.table]
