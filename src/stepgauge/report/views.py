"""Records as tables: which columns a set of records needs, and how a figure is written."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepgauge.report.table import Table
from stepgauge.spec.record import Record, Sample

STATISTICS = ("median", "range", "p10", "p90", "mean", "std", "n")
LABELS = {"median": "", "range": " p10 – p90"}
# Spec fields that name a row even where all rows share them.
ALWAYS = ("size", "precision")


@dataclasses.dataclass(frozen=True)
class Heading:
    text: str
    scale: float = 1.0


_UNITS: Mapping[str, Heading] = {
    "bytes": Heading("GiB", 2.0**-30),
    "fraction of dense peak": Heading("%", 100.0),
}
_NAMES = {"mfu": "MFU %", "tflop_per_s": "TFLOP/s", "tokens_per_s": "tokens/s"}


def heading(metric: str, unit: str) -> str:
    """`forward_ms` -> "forward ms", `peak_bytes` -> "peak GiB"."""
    if metric in _NAMES:
        return _NAMES[metric]
    name = metric.removesuffix(f"_{unit}").replace("_", " ")
    return f"{name} {_UNITS[unit].text if unit in _UNITS else unit}"


def number(value: float | None, unit: str = "") -> str:
    """Four significant digits, no exponent; thousands separated; nothing for None."""
    if value is None:
        return ""
    value *= _UNITS[unit].scale if unit in _UNITS else 1.0
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def flatten(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Nested specs as one level of fields; the outer one wins where names meet."""
    inner = {k: v for part in spec.values() if isinstance(part, Mapping) for k, v in flatten(part).items()}
    return inner | {k: v for k, v in spec.items() if not isinstance(v, Mapping)}


def varying(records: Sequence[Record]) -> list[str]:
    """Spec fields that tell the records apart, those of ALWAYS that they have first."""
    specs = [flatten(record.spec) for record in records]
    names = list(dict.fromkeys(name for spec in specs for name in spec))
    first = [name for name in ALWAYS if name in names]
    differs = [n for n in names if n not in first and len({str(spec.get(n)) for spec in specs}) > 1]
    shape = {"d_model", "d_ff", "num_layers", "num_heads"}
    sizes = {(spec.get("size"), *(spec.get(n) for n in sorted(shape))) for spec in specs}
    if len(sizes) == len({spec.get("size") for spec in specs}):
        differs = [name for name in differs if name not in shape]
    return first + differs


def record_table(records: Sequence[Record], *, statistics: Sequence[str] = ()) -> Table:
    """One row a record: what tells it apart, its figures by the statistics asked for, and why it has none.

    Without `statistics`: medians, and the range of the whole step.
    """
    fields = varying(records)
    units = {name: sample.unit for record in records for name, sample in record.metrics.items()}
    # A figure without spread needs no statistics.
    spread = {name for record in records for name, sample in record.metrics.items() if sample.n > 1}
    columns = [
        (name, statistic, heading(name, unit) + LABELS.get(statistic, f" {statistic}"))
        for name, unit in units.items()
        for statistic in _statistics_of(name, statistics, has_spread=name in spread)
    ]
    notes = any(record.status != "ok" or record.note for record in records)
    rows = []
    for record in records:
        spec = flatten(record.spec)
        cells = [str(spec.get(name, "")) for name in fields]
        cells += [_figure(record.metrics.get(name), statistic) for name, statistic, _ in columns]
        rows.append(cells + ([_remark(record)] if notes else []))
    texts = [text for _, _, text in columns]
    head = [name.replace("_", " ") for name in fields] + texts + (["remark"] if notes else [])
    return Table(head, rows, numeric=frozenset(texts))


def _statistics_of(metric: str, asked: Sequence[str], *, has_spread: bool) -> Sequence[str]:
    if asked and has_spread:
        return asked
    return ("median", "range") if metric == "step_ms" and has_spread else ("median",)


def _figure(sample: Sample | None, statistic: str) -> str:
    if sample is None:
        return ""
    if statistic == "n":
        return str(sample.n)
    if statistic == "range":
        return f"{number(sample.p10, sample.unit)} – {number(sample.p90, sample.unit)}"
    return number(getattr(sample, statistic), sample.unit)


def _remark(record: Record) -> str:
    return f"{record.status.upper()}: {record.note}" if record.status != "ok" else record.note


@dataclasses.dataclass(frozen=True)
class Difference:
    """One figure in two runs. `exceeds_spread`: the ranges p10 to p90 do not meet."""

    first: Record
    second: Record
    metric: str

    @property
    def ratio(self) -> float:
        """Second over first."""
        before, after = self.first.metrics[self.metric].median, self.second.metrics[self.metric].median
        return after / before if before else math.nan

    @property
    def exceeds_spread(self) -> bool:
        before, after = self.first.metrics[self.metric], self.second.metrics[self.metric]
        return before.p90 < after.p10 or after.p90 < before.p10


def differences(first: Iterable[Record], second: Iterable[Record], *, ignoring: Iterable[str] = ()) -> list[Difference]:
    """Figures of the records that both runs have, paired by what was run, but for the fields `ignoring`."""
    partners = {_pair_key(record, ignoring): record for record in second}
    return [
        Difference(record, partner, metric)
        for record in first
        if (partner := partners.get(_pair_key(record, ignoring)))
        for metric in record.metrics
        if metric in partner.metrics
    ]


def _pair_key(record: Record, ignoring: Iterable[str]) -> tuple[Any, ...]:
    left_out = set(ignoring)
    fields = flatten(record.spec).items()
    return (record.kind, *sorted((name, str(value)) for name, value in fields if name not in left_out))


def difference_table(found: Sequence[Difference]) -> Table:
    fields = varying([difference.first for difference in found])
    rows = []
    for difference in found:
        before, after = (r.metrics[difference.metric] for r in (difference.first, difference.second))
        spec = flatten(difference.first.spec)
        verdict = "differs" if difference.exceeds_spread else "within spread"
        figures = [number(before.median, before.unit), number(after.median, after.unit)]
        cells = [str(spec.get(name, "")) for name in fields]
        rows.append([*cells, heading(difference.metric, before.unit), *figures, f"{difference.ratio:.3f}", verdict])
    head = [*(name.replace("_", " ") for name in fields), "figure", "A", "B", "B / A", "verdict"]
    return Table(head, rows, numeric=frozenset(("A", "B", "B / A")))
