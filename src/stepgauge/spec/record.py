"""The one record type for everything measured, modelled or published.

Tables, plots and comparisons are views of records.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self

from stepgauge.spec.kinds import RENAMED_METRICS, completed

SCHEMA = 1
PROVENANCES = ("measured", "calibrated", "modelled", "published")
STATUSES = ("ok", "oom", "failed")
SHOWN_FIELDS = 4  # of a row that is no record, in a message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Statistics of a metric. An exact value, such as a byte count or a published one, has n = 1."""

    unit: str
    n: int
    mean: float
    std: float
    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float], unit: str) -> Self:
        """Returns statistics of at least one value: sample std (n - 1), interpolated percentiles."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("a sample needs at least one value")
        return cls(
            unit=unit,
            n=len(ordered),
            mean=statistics.fmean(ordered),
            std=statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
            median=statistics.median(ordered),
            p10=_percentile(ordered, 0.1),
            p90=_percentile(ordered, 0.9),
        )

    @classmethod
    def exact(cls, value: float, unit: str) -> Self:
        """Returns the sample of one exact value."""
        return cls.of([value], unit)


def _percentile(ordered: list[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low + (high - low) * (position - math.floor(position))


def now() -> str:
    """Returns the current time as records have it: ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat("T", "seconds")


class OtherRowError(ValueError):
    """A line is an object of JSON that never was a record: a row of a script, or a hardware file."""

    def __init__(self, fields: Sequence[str]):
        more = f" and {len(fields) - SHOWN_FIELDS} more" if len(fields) > SHOWN_FIELDS else ""
        names = ", ".join(fields[:SHOWN_FIELDS])
        super().__init__(f"rows with the fields {names}{more}" if fields else "empty objects")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A spec, where it ran, and the results.

    kind         kind of the spec: "step", "train", ...
    spec         the spec as JSON values; nested specs are nested objects
    metrics      name -> Sample; the name ends in the unit: step_ms, peak_bytes
    series       name -> values, for curves
    tables       name -> rows, the first being the headings, for other results
    environment  machine, versions, commit
    provenance   one of PROVENANCES; published records also have a `source`
    status       "ok", "oom" (out of memory) or "failed"; `note` then has one sentence on the reason
    created      date as returned by `now`
    """

    kind: str
    spec: Mapping[str, Any]
    metrics: Mapping[str, Sample] = dataclasses.field(default_factory=dict)
    series: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, list[list[Any]]] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    provenance: str = "measured"
    source: str = ""
    status: str = "ok"
    note: str = ""
    created: str = ""

    def __post_init__(self) -> None:
        if self.provenance not in PROVENANCES:
            raise ValueError(
                f"provenance is {self.provenance!r}; choose one of {', '.join(PROVENANCES)}"
            )
        if self.status not in STATUSES:
            raise ValueError(f"status is {self.status!r}; choose one of {', '.join(STATUSES)}")

    @classmethod
    def of(cls, spec: Any, **fields: Any) -> Self:
        """Returns a record of the spec, which is a dataclass with a `kind`."""
        return cls(kind=spec.kind, spec=dataclasses.asdict(spec), **fields)

    @property
    def key(self) -> str:
        """Equal for two records of the same spec.

        It pairs predictions with measurements, and the rows of two runs.
        """
        return f"{self.kind} {json.dumps(self.spec, sort_keys=True)}"

    @property
    def identity(self) -> tuple[str, ...]:
        """Spec, provenance and place. A record replaces earlier ones with the same identity."""
        return (self.key, self.provenance, self.source, *self.place)

    @property
    def place(self) -> tuple[str, ...]:
        """Device and torch version; on a CPU also threads; for predictions also the hardware file."""
        names = ["device", "torch", "hardware"]
        if self.environment.get("device") == self.environment.get("cpu"):
            names.append("threads")
        return tuple(str(self.environment.get(name, "")) for name in names)

    def median(self, metric: str) -> float | None:
        """Returns the median of the metric, or None if the record does not have it."""
        sample = self.metrics.get(metric)
        return sample.median if sample else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of the record's JSON."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """Returns one line of JSON that from_json turns into an equal record.

        Raises ValueError for NaN and infinity.
        """
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Reads the output of to_json. Raises ValueError if it is not a record of this schema, and
        OtherRowError if it is a row of something else.
        """
        try:
            value = json.loads(line, parse_constant=_refuse)
        except json.JSONDecodeError:
            raise ValueError("it is not JSON") from None
        if isinstance(value, dict) and not {"schema", "metrics"} <= value.keys():
            raise OtherRowError(list(value))
        if not isinstance(value, dict) or value.pop("schema", None) != SCHEMA:
            raise ValueError(f"not a record of schema {SCHEMA}")
        try:
            metrics = {
                RENAMED_METRICS.get(name, name): Sample(**sample)
                for name, sample in value.pop("metrics").items()
            }
            record = cls(**value, metrics=metrics)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a record: {error}") from None
        record.check()
        return dataclasses.replace(record, spec=completed(record.kind, record.spec))

    def check(self) -> None:
        """Raises ValueError if a field has the wrong type."""
        for name in ("spec", "series", "tables", "environment"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"not a record: {name} is not an object")
        for name in ("kind", "provenance", "source", "status", "note", "created"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"not a record: {name} is not text")
        for name, sample in self.metrics.items():
            figures = (sample.n, sample.mean, sample.std, sample.median, sample.p10, sample.p90)
            if not all(isinstance(figure, int | float) for figure in figures):
                raise ValueError(f"not a record: {name} has values that are not numbers")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")
