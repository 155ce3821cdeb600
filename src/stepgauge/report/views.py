"""Records as tables: which columns a set of records needs, and how a figure is written."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepgauge.report.table import Table
from stepgauge.spec.fallbacks import stand_ins
from stepgauge.spec.fields import named_in, word_of, words
from stepgauge.spec.kinds import declarations
from stepgauge.spec.record import Record, Sample

STATISTICS = ("median", "range", "p10", "p90", "mean", "std", "n")
SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")
MOST_NAMED = 3  # of rows without a partner
LABELS = {"median": "", "range": " p10 – p90"}
# Spec fields that name a row even where all rows share them.
ALWAYS = ("size", "wrapper", "precision", "compile")


@dataclasses.dataclass(frozen=True)
class Heading:
    text: str
    scale: float = 1.0


_UNITS: Mapping[str, Heading] = {
    "us": Heading("µs"),
    "bytes": Heading("GiB", 2.0**-30),
    "fraction of dense peak": Heading("%", 100.0),
    "signed fraction": Heading("%", 100.0),
}
_NAMES = {
    "algbw_gb_per_s": "algbw GB/s",
    "busbw_gb_per_s": "busbw GB/s",
    "gb_per_s": "GB/s",
    "mfu": "MFU %",
    "tflop_per_s": "TFLOP/s",
    "tokens_per_s": "tokens/s",
}
_RATES = ("_gb_per_s", "_tflop_per_s")


def heading(metric: str, unit: str) -> str:
    """`forward_ms` -> "forward ms", `peak_bytes` -> "peak GiB"."""
    if metric in _NAMES:
        return _NAMES[metric]
    name = metric.removesuffix(f"_{unit}")
    for rate in _RATES:
        name = name.removesuffix(rate)
    name = name.replace("_", " ")
    return f"{name} {_UNITS[unit].text if unit in _UNITS else unit}".strip()


def number(value: float | None, unit: str = "") -> str:
    """Four significant digits, no exponent; thousands separated; nothing for None."""
    if value is None:
        return ""
    value *= _UNITS[unit].scale if unit in _UNITS else 1.0
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def count(value: float) -> str:
    """Of something that is counted: no decimals where it comes to a whole number."""
    return f"{value:,.0f}" if float(value).is_integer() else number(value)


@dataclasses.dataclass(frozen=True)
class SizeUnit:
    """What a table's sizes are written in."""

    text: str
    bytes: int

    def of(self, size: float | None) -> str:
        return number(None if size is None else size / self.bytes)


def size_unit(sizes: Iterable[float | None]) -> SizeUnit:
    """GiB; MiB or KiB where all sizes are below a GiB or MiB."""
    largest = max((size for size in sizes if size is not None), default=0.0)
    units = (SizeUnit("GiB", 2**30), SizeUnit("MiB", 2**20), SizeUnit("KiB", 2**10))
    return next(
        (unit for unit in units if largest >= unit.bytes), units[-1] if largest else units[0]
    )


def flatten(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Nested specs as one level of fields; the outer one wins where names meet."""
    inner = {
        k: v
        for part in spec.values()
        if isinstance(part, Mapping)
        for k, v in flatten(part).items()
    }
    return inner | {k: v for k, v in spec.items() if not isinstance(v, Mapping)}


def varying(records: Sequence[Record]) -> list[str]:
    """Spec fields that tell the records apart, those of ALWAYS that they have first."""
    specs = [flatten(record.spec) for record in records]
    names = list(dict.fromkeys(name for spec in specs for name in spec))
    first = [name for name in ALWAYS if name in names]
    differs = [n for n in names if n not in first and len({str(spec.get(n)) for spec in specs}) > 1]
    sizes = {(spec.get("size"), *(spec.get(n) for n in SHAPE)) for spec in specs}
    names_a_shape = len(sizes) == len({spec.get("size") for spec in specs})
    if any(spec.get("size") == "custom" for spec in specs):
        differs = [*(n for n in SHAPE if n not in differs), *differs]
    elif names_a_shape:
        differs = [name for name in differs if name not in SHAPE]
    return first + differs


def record_table(
    records: Sequence[Record], *, statistics: Sequence[str] = (), first: Sequence[str] = ()
) -> Table:
    """One row a record: what tells it apart, its figures by the statistics asked for, and why it
    has none.

    Without `statistics`: medians, and the range of the whole step. `first`: fields that the table
    begins with.
    """
    alike = shared(records)
    fields = list(dict.fromkeys([*first, *varying(records), *alike.spoken]))
    units = {name: sample.unit for record in records for name, sample in record.metrics.items()}
    # A figure without spread needs no statistics.
    spread = {name for record in records for name, sample in record.metrics.items() if sample.n > 1}
    columns = [
        (name, statistic, heading(name, unit) + LABELS.get(statistic, f" {statistic}"))
        for name, unit in units.items()
        for statistic in _statistics_of(name, statistics, has_spread=name in spread)
    ]
    notes = any(map(remark, records))
    rows = []
    for record in records:
        spec = flatten(record.spec)
        cells = [str(spec.get(name, "")) for name in fields]
        cells += [_figure(record.metrics.get(name), statistic) for name, statistic, _ in columns]
        rows.append(cells + ([remark(record)] if notes else []))
    texts = [text for _, _, text in columns]
    head = [name.replace("_", " ") for name in fields] + texts + (["remark"] if notes else [])
    caption = " on ".join(filter(None, (alike.words, _device(records))))
    return Table(head, rows, numeric=frozenset(texts), caption=caption, said=alike.columns())


def _device(records: Sequence[Record]) -> str:
    """Where all were measured, if that was one kind of device."""
    known = {str(record.environment.get("device", "")) for record in records}
    return (
        known.pop()
        if len(known) == 1 and all(record.provenance == "measured" for record in records)
        else ""
    )


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
    value = getattr(sample, statistic)
    return count(value) if not sample.unit else number(value, sample.unit)


def remark(record: Record) -> str:
    """Why the record has no figures, or what is to be known of those that it has."""
    if record.status != "ok":
        return f"{record.status.upper()}: {record.note}"
    return "; ".join([*([record.note] if record.note else []), *stand_ins(record)])


@dataclasses.dataclass(frozen=True)
class Difference:
    """One figure in two runs. `exceeds_spread`: the ranges p10 to p90 do not meet; a single value
    has no range.
    """

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
class Comparison:
    """What two runs have in common, and what only one of them could measure or was asked for, in
    sentences.
    """

    found: list[Difference]
    alone: list[str]


def compare(
    first: Iterable[Record], second: Iterable[Record], *, ignoring: Sequence[str] = ()
) -> Comparison:
    """Pairs the records of two runs by what was run, but for the fields `ignoring`, by their names
    or their options'.

    Raises ValueError if a field is unknown, or if several records of a run would be the same
    without the fields.
    """
    sides = [_by_pair_key(list(records), ignoring) for records in (first, second)]
    missing = (
        _without_partner(
            [record for key, record in own.items() if key not in other], len(own), name
        )
        for own, other, name in ((sides[0], sides[1], "A"), (sides[1], sides[0], "B"))
    )
    found, alone = [], []
    for key, record in sides[0].items():
        partner = sides[1].get(key)
        if partner is None:
            continue
        found += [
            Difference(record, partner, metric)
            for metric in record.metrics
            if metric in partner.metrics
        ]
        for side, other, name in ((record, partner, "A"), (partner, record, "B")):
            if side.status != "ok" and other.status == "ok":
                alone.append(f"{describe(side)}: {side.status.upper()} in {name} ({side.note})")
    return Comparison(found, [*alone, *(sentence for sentence in missing if sentence)])


def closest_differ_in(first: Sequence[Record], second: Sequence[Record]) -> list[str]:
    """The fields in which those two records, of one kind, differ that differ least; nothing where
    kinds differ.
    """
    specs = [
        [(record.kind, flatten(record.spec)) for record in records] for records in (first, second)
    ]
    differences = [
        [name for name in {**a, **b} if a.get(name) != b.get(name)]
        for (kind_a, a), (kind_b, b) in itertools.product(*specs)
        if kind_a == kind_b
    ]
    return min(differences, key=len, default=[])


def _without_partner(records: Sequence[Record], rows: int, run: str) -> str:
    """How many of a run's rows the other has not, the first few by name; nothing for none."""
    if not records:
        return ""
    named = labels(records)[:MOST_NAMED]
    more = f", and {len(records) - len(named)} more" if len(records) > len(named) else ""
    return f"{len(records)} of {rows} rows of {run} without a partner: {'; '.join(named)}{more}"


def describe(record: Record) -> str:
    """What was run, in a few words."""
    return " ".join([record.kind, *_said(record)])


def _said(record: Record) -> list[str]:
    spec, declared = flatten(record.spec), declarations(record.kind, record.spec)
    shape = getattr(declared[0], "shape", ()) if declared else ()  # of an operation
    sizes = [" × ".join(str(spec[name]) for name in shape)] if shape else []
    return [
        *sizes,
        *(word for each in declared for word in words(each, spec, leaving_out=_unnamed(spec))),
    ]


def _unnamed(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields that say nothing: an own model has no preset, and a preset implies its shape."""
    presets = ("size", "batch") if spec.get("own") else ()
    return (*presets, *(SHAPE if spec.get("size") != "custom" else ()))


@dataclasses.dataclass(frozen=True)
class Shared:
    """What is the same for all records, of one kind: in a few words, the fields in these, and
    fields at their usual.
    """

    words: str
    spoken: Sequence[str]
    usual: frozenset[str]

    def columns(self) -> frozenset[str]:
        return frozenset(name.replace("_", " ") for name in (*self.spoken, *self.usual))


def shared(records: Sequence[Record]) -> Shared:
    specs = [flatten(record.spec) for record in records]
    spec = specs[0] if specs else {}
    same = [
        name for name, value in spec.items() if all(other.get(name) == value for other in specs)
    ]
    fields = [
        field
        for declared in (declarations(records[0].kind, records[0].spec) if records else ())
        for field in dataclasses.fields(declared)
        if field.metadata.get("word")
        and field.name not in _unnamed(spec)
        and named_in(field) <= spec.keys()
    ]
    said, spoken = [], []
    for field in fields:
        word, named = word_of(field, spec), {field.name, *named_in(field)}
        if not word:
            continue
        spoken += [name for name in same if name in named]
        said += (
            [word]
            if named <= {*same}
            else [f"{n.replace('_', ' ')} {spec[n]}" for n in same if n in named]
        )
    quiet = {field.name for field in fields if not word_of(field, spec)} & {*same}
    return Shared(", ".join(said), list(dict.fromkeys(spoken)), frozenset(quiet))


def labels(records: Sequence[Record]) -> list[str]:
    """What was run, in words; where they are the same for several records, with the fields that
    tell those apart.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(describe(record), []).append(flatten(record.spec))

    def label(record: Record) -> str:
        alike, spec = groups[describe(record)], flatten(record.spec)
        differs = [name for name in spec if len({str(other.get(name)) for other in alike}) > 1]
        return ", ".join(
            [describe(record), *(f"{name.replace('_', ' ')} {spec[name]}" for name in differs)]
        )

    return [label(record) for record in records]


def names(records: Sequence[Record]) -> list[str]:
    """What was run, in words, with what the words leave out where it is not the first record's."""
    return list(map(_written, _phrases(records)))


def apart(records: Sequence[Record]) -> tuple[str, list[str]]:
    """What all names begin and end with, and what is left of each; "plain" where that is nothing."""
    split = _phrases(records)
    begin = _common(split)
    rest = [phrases[len(begin) :] for phrases in split]
    end = _common([phrases[::-1] for phrases in rest])[::-1]
    return _written([*begin, *end]), [
        _written(each[: len(each) - len(end)]) or "plain" for each in rest
    ]


def _phrases(records: Sequence[Record]) -> list[list[str]]:
    """What `names` are made of, a list a record; what the words leave out begins with a comma."""
    said = {
        name
        for record in records
        for declared in declarations(record.kind, record.spec)
        for field in dataclasses.fields(declared)
        for name in named_in(field)
    }
    rest = [name for name in varying(records) if name not in said]
    specs = [flatten(record.spec) for record in records]
    unsaid = [
        [
            f", {name.replace('_', ' ')} {spec.get(name)}"
            for name in rest
            if spec.get(name) != specs[0].get(name)
        ]
        for spec in specs
    ]
    return [[*_said(record), *more] for record, more in zip(records, unsaid, strict=True)]


def _written(phrases: Sequence[str]) -> str:
    return " ".join(phrases).replace(" , ", ", ").removeprefix(", ")


def _common(rows: Sequence[Sequence[str]]) -> list[str]:
    """The phrases that all begin with."""
    return [
        each[0]
        for each in itertools.takewhile(lambda each: len(set(each)) == 1, zip(*rows, strict=False))
    ]


def _by_pair_key(
    records: Sequence[Record], ignoring: Sequence[str]
) -> dict[tuple[Any, ...], Record]:
    known = {name for record in records for name in flatten(record.spec)}
    flags = {
        field.metadata["flag"]: field.name
        for record in records
        for declared in declarations(record.kind, record.spec)
        for field in dataclasses.fields(declared)
        if field.metadata.get("flag")
    }
    ignoring = [name if name in known else flags.get(name, name) for name in ignoring]
    if unknown := set(ignoring) - known:
        raise ValueError(
            f"ignoring is {unknown.pop()!r}; choose from {', '.join(sorted({*known, *flags}))}"
        )
    pairs: dict[tuple[Any, ...], Record] = {}
    for record in records:
        fields = flatten(record.spec).items()
        key = (
            record.kind,
            *sorted((name, str(value)) for name, value in fields if name not in ignoring),
        )
        if key in pairs:
            raise ValueError(
                f"without {', '.join(ignoring)} a run has several rows of {describe(record)}; ignore fewer fields"
            )
        pairs[key] = record
    return pairs


def difference_table(found: Sequence[Difference]) -> Table:
    """One row a figure; a field that differs within a pair is written as "A → B"."""
    records = [record for difference in found for record in (difference.first, difference.second)]
    alike = shared(records)
    fields = list(dict.fromkeys([*varying(records), *alike.spoken]))
    rows = []
    for difference in found:
        before, after = (
            r.metrics[difference.metric] for r in (difference.first, difference.second)
        )
        specs = flatten(difference.first.spec), flatten(difference.second.spec)
        values = [tuple(str(spec.get(name, "")) for spec in specs) for name in fields]
        figures = [_figure(before, "median"), _figure(after, "median")]
        cells = [a if a == b else f"{a} → {b}" for a, b in values]
        head = [*cells, heading(difference.metric, before.unit), *figures]
        ratio = "" if math.isnan(difference.ratio) else f"{difference.ratio:.3f}"
        rows.append([*head, ratio, _verdict(difference)])
    columns = [*(name.replace("_", " ") for name in fields), "figure", "A", "B", "B / A", "verdict"]
    numeric = frozenset(("A", "B", "B / A"))
    return Table(columns, rows, numeric=numeric, caption=alike.words, said=alike.columns())


def _verdict(difference: Difference) -> str:
    if not difference.has_spread:
        return ""
    return "differs" if difference.exceeds_spread else "within spread"
