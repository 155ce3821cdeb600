"""One record type for everything that was measured, modelled or published. Tables, plots and
comparisons are views.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Self

from stepgauge.spec.kinds import RENAMED_METRICS, completed

SCHEMA = 1
PROVENANCES = ("measured", "calibrated", "modelled", "published")
STATUSES = ("ok", "oom", "failed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A figure and its spread. A figure that has none (a byte count, a published value) has n = 1."""

    unit: str
    n: int
    mean: float
    std: float
    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float], unit: str) -> Self:
        """Statistics of at least one value; std of the sample (n - 1), linear percentiles."""
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
        return cls.of([value], unit)


def _percentile(ordered: list[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low + (high - low) * (position - math.floor(position))


def now() -> str:
    """ISO 8601, UTC, to the second: the date of a record."""
    return datetime.now(UTC).isoformat("T", "seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What was run, where, and what came out.

    kind         which measurement: "step", "train", ...
    spec         what was asked, as plain JSON values; nested specs nested
    metrics      name -> Sample; names carry their unit: step_ms, peak_bytes
    series       name -> values, for curves
    tables       name -> rows, the first the headings, for what figures alone do not say
    environment  machine, versions, commit
    provenance   one of PROVENANCES; published records name their `source`
    status       "ok", "oom" (did not fit) or "failed"; `note` then says why in one sentence
    created      as `now` gives it
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
        """The record of a spec, a dataclass with a `kind`."""
        return cls(kind=spec.kind, spec=dataclasses.asdict(spec), **fields)

    @property
    def key(self) -> str:
        """Equal for two records of the same thing asked: what pairs a prediction with its
        measurement, and the rows of two runs.
        """
        return f"{self.kind} {json.dumps(self.spec, sort_keys=True)}"

    @property
    def identity(self) -> tuple[str, ...]:
        """What tells records apart: what was asked, measured or modelled or published, and where.

        A record replaces an earlier one of the same identity, and only that.
        """
        return (self.key, self.provenance, self.source, *self.place)

    @property
    def place(self) -> tuple[str, ...]:
        """Where a row holds: device, torch version and on a CPU the number of threads; of a
        modelled row also the hardware file that it was computed from.
        """
        names = ["device", "torch", "hardware"]
        if self.environment.get("device") == self.environment.get("cpu"):
            names.append("threads")
        return tuple(str(self.environment.get(name, "")) for name in names)

    def median(self, metric: str) -> float | None:
        sample = self.metrics.get(metric)
        return sample.median if sample else None

    def to_dict(self) -> dict[str, Any]:
        """What to_json writes."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """One line, without NaN or infinity, that from_json reads back to an equal record."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Raises ValueError for text that is no record of this schema."""
        try:
            value = json.loads(line, parse_constant=_refuse)
        except json.JSONDecodeError:
            raise ValueError("it is no JSON") from None
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
        """Raises ValueError where a field has not the type that it should."""
        for name in ("spec", "series", "tables", "environment"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"not a record: {name} is no object")
        for name in ("kind", "provenance", "source", "status", "note", "created"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"not a record: {name} is no text")
        for name, sample in self.metrics.items():
            figures = (sample.n, sample.mean, sample.std, sample.median, sample.p10, sample.p90)
            if not all(isinstance(figure, int | float) for figure in figures):
                raise ValueError(f"not a record: {name} has figures that are no numbers")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no figure")
