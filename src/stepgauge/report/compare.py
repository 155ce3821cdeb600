"""Compares two runs: pairs their rows and finds figures that differ by more than their spread."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from stepgauge.report.names import describe, flatten, identifying_fields, labels, shared_values
from stepgauge.report.numbers import heading
from stepgauge.report.table import Table
from stepgauge.report.views import figure, is_measurable
from stepgauge.spec.disturbance import MISSED_CORES, describe_disturbance, is_disturbed
from stepgauge.spec.fallbacks import fallbacks
from stepgauge.spec.first_names import first_names
from stepgauge.spec.kinds import declarations
from stepgauge.spec.record import Record

MAX_NAMED = 3  # rows without a partner that are named; the others are counted
PROVENANCE = "provenance"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One metric in two runs. `exceeds_spread` is true if the ranges p10 to p90 do not overlap."""

    first: Record
    second: Record
    metric: str

    @property
    def ratio(self) -> float:
        """Second over first."""
        before, after = (
            self.first.metrics[self.metric].median,
            self.second.metrics[self.metric].median,
        )
        return after / before if before else math.nan

    @property
    def has_spread(self) -> bool:
        return all(record.metrics[self.metric].n > 1 for record in (self.first, self.second))

    @property
    def exceeds_spread(self) -> bool:
        before, after = self.first.metrics[self.metric], self.second.metrics[self.metric]
        return self.has_spread and (before.p90 < after.p10 or after.p90 < before.p10)


@dataclasses.dataclass(frozen=True)
class RunDifferences:
    """The metrics of rows that both runs have, and notes on rows that only one of them has."""

    differences: list[Difference]
    notes: list[str]


def compare(
    first: Iterable[Record], second: Iterable[Record], *, ignoring: Sequence[str] = ()
) -> RunDifferences:
    """Pairs the records of two runs whose specs agree in all fields except those `ignoring`, which are
    named as fields or as options.

    Raises ValueError for an unknown field, or if without the fields a run has several records with
    the same spec.
    """
    sides = [_by_pair_key(list(records), ignoring) for records in (first, second)]
    missing = (
        _without_partner(
            [record for key, record in own.items() if key not in other], len(own), name
        )
        for own, other, name in ((sides[0], sides[1], "A"), (sides[1], sides[0], "B"))
    )
    differences, notes = [], []
    for key, record in sides[0].items():
        partner = sides[1].get(key)
        if partner is None:
            continue
        differences += [
            Difference(record, partner, metric)
            for metric in record.metrics
            if metric in partner.metrics
            and metric != MISSED_CORES  # which says how good the figures are
            and all(is_measurable(side, metric) for side in (record, partner))
        ]
        notes += _why_unreliable(record, partner)
        for side, other, name in ((record, partner, "A"), (partner, record, "B")):
            if side.status != "ok" and other.status == "ok":
                notes.append(f"{describe(side)}: {side.status.upper()} in {name} ({side.note})")
    return RunDifferences(differences, [*notes, *filter(None, missing)])


def _why_unreliable(first: Record, second: Record) -> list[str]:
    """Returns why the ratios of a pair may not be due to what differs in its specs."""
    return [
        f"{describe(record)}: {reason} in {name}"
        for record, name in ((first, "A"), (second, "B"))
        for reason in (
            *fallbacks(record),
            *([describe_disturbance(record)] if is_disturbed(record) else []),
        )
    ]


def closest_differ_in(first: Sequence[Record], second: Sequence[Record]) -> list[str]:
    """Returns the fields in which the two most similar records of one kind differ; [] if no two
    records have the same kind.
    """
    differences = []
    for one, other in itertools.product(first, second):
        if one.kind == other.kind:
            a, b = flatten(one.spec), flatten(other.spec)
            differences.append([name for name in {**a, **b} if a.get(name) != b.get(name)])
    return min(differences, key=len, default=[])


def _without_partner(records: Sequence[Record], rows: int, run: str) -> str:
    """Returns a sentence on the rows that only this run has, naming the first; "" if there are none."""
    if not records:
        return ""
    named = first_names(labels(records), MAX_NAMED, separator="; ")
    return f"{len(records)} of {rows} rows of {run} without a partner: {named}"


def _by_pair_key(
    records: Sequence[Record], ignoring: Sequence[str]
) -> dict[tuple[Any, ...], Record]:
    """Returns the records by kind, spec fields and provenance, without the ignored fields."""
    ignored = _field_names(records, ignoring)
    pairs: dict[tuple[Any, ...], Record] = {}
    for record in records:
        fields = {**flatten(record.spec), PROVENANCE: record.provenance}
        kept = ((name, str(value)) for name, value in fields.items() if name not in ignored)
        key = (record.kind, *sorted(kept))
        if key in pairs:
            raise ValueError(
                f"without {', '.join(ignoring)} a run has several rows of {describe(record)}; "
                "ignore fewer fields"
            )
        pairs[key] = record
    return pairs


def _field_names(records: Sequence[Record], ignoring: Sequence[str]) -> set[str]:
    """Returns field names for a mix of field names and options. Raises ValueError for unknown ones."""
    known = {PROVENANCE, *(name for record in records for name in flatten(record.spec))}
    flags = {
        field.metadata["flag"]: field.name
        for record in records
        for declared in declarations(record.kind, record.spec)
        for field in dataclasses.fields(declared)
        if field.metadata.get("flag")
    }
    names = {name if name in known else flags.get(name, name) for name in ignoring}
    if unknown := names - known:
        raise ValueError(
            f"ignoring is {unknown.pop()!r}; choose from {', '.join(sorted({*known, *flags}))}"
        )
    return names


def difference_table(differences: Sequence[Difference]) -> Table:
    """Returns one row per metric. A field that differs within a pair is shown as "A → B"."""
    records = [record for each in differences for record in (each.first, each.second)]
    shared = shared_values(records)
    fields = list(dict.fromkeys([*identifying_fields(records), *shared.fields]))
    rows = []
    for difference in differences:
        first, second = flatten(difference.first.spec), flatten(difference.second.spec)
        cells: list[Any] = []
        for name in fields:
            a, b = first.get(name), second.get(name)
            cells.append(a if a == b else f"{a} → {b}")
        before = difference.first.metrics[difference.metric]
        after = difference.second.metrics[difference.metric]
        ratio = None if math.isnan(difference.ratio) else difference.ratio
        cells += [heading(difference.metric, before.unit), ratio, _verdict(difference)]
        rows.append([*cells, figure(before), figure(after)])
    columns = [*(name.replace("_", " ") for name in fields), "figure", "B / A", "verdict", "A", "B"]
    return Table(
        columns,
        rows,
        numeric=frozenset(("A", "B", "B / A")),
        caption=shared.text,
        hidden=shared.columns(),
        formats={"B / A": ".3f"},
    )


def _verdict(difference: Difference) -> str:
    if not difference.has_spread:
        return ""
    return "differs" if difference.exceeds_spread else "within spread"
