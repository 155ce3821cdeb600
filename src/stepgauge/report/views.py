"""Records as a table: which columns a set of records needs, and what each row is worth."""

from collections.abc import Sequence
from typing import Any

from stepgauge.report.names import flatten, identifying_fields, shared_values
from stepgauge.report.numbers import Doubtful, heading, scaled, whole
from stepgauge.report.table import Range, Table
from stepgauge.spec.disturbance import describe_disturbance, is_disturbed
from stepgauge.spec.fallbacks import fallbacks
from stepgauge.spec.predictions import STEP, Row, caveat, steps_beside
from stepgauge.spec.record import Record, Sample

STATISTICS = ("median", "range", "p10", "p90", "mean", "std", "n")
LABELS = {"median": "", "range": " p10 – p90"}
FIRST = (
    *("step_ms", "time_ms", "exposed_ms"),
    *("data_exposed_ms", "tensor_exposed_ms", "pipeline_exposed_ms", "tokens_per_s"),
    *("mfu", "peak_bytes"),
)  # figures that people look for
NOT_MEASURABLE = "not measurable here"  # a difference of two steps that came out below zero


def record_table(
    records: Sequence[Record], *, statistics: Sequence[str] = (), first: Sequence[str] = ()
) -> Table:
    """One row a record: what tells it apart, its figures by the statistics asked for, and a remark.

    Without `statistics`: medians, and the range of the whole step. `first`: fields that the table
    begins with.
    """
    pairs = steps_beside(records)
    records = [row.record for row in pairs]
    alike = shared_values(records)
    apart = _apart(records)
    fields = list(dict.fromkeys([*first, *identifying_fields(records), *apart, *alike.fields]))
    figures = _figures(records, statistics)
    remarks = [remark_beside(row) for row in pairs]
    predictions = _predictions(pairs)
    extra = {"remark": remarks} if any(remarks) else {}
    rows = []
    for place, record in enumerate(records):
        spec = flatten(record.spec) | {name: values[place] for name, values in apart.items()}
        cells = [spec.get(name) for name in fields]
        cells += [values[place] for values in predictions.values()]
        cells += [_cell(record, name, statistic) for name, statistic, _ in figures]
        rows.append([*cells, *(values[place] for values in extra.values())])
    texts = [*predictions, *(text for _, _, text in figures)]
    return Table(
        [*(name.replace("_", " ") for name in fields), *texts, *extra],
        rows,
        numeric=frozenset(texts),
        caption=" on ".join(filter(None, (alike.text, _device(records)))),
        hidden=alike.columns(),
        names=len(fields),
        formats={"error": "+.1%"},
    )


def _apart(records: Sequence[Record]) -> dict[str, list[str]]:
    """What tells rows apart and is no field of theirs: measured or not, and on which device."""
    found: dict[str, list[str]] = {}
    if len({record.provenance for record in records}) > 1:
        found["provenance"] = [record.provenance for record in records]
    devices = [_measured_on(record) for record in records]
    if len({device for device in devices if device}) > 1:
        found["measured on"] = devices
    return found


def _measured_on(record: Record) -> str:
    is_measured = record.provenance == "measured"
    return str(record.environment.get("device", "")) if is_measured else ""


def _predictions(pairs: Sequence[Row]) -> dict[str, list[float | None]]:
    """What was predicted of each step and the signed error, where anything was."""
    predictions = [row.prediction for row in pairs]
    if not any(predictions):
        return {}
    predicted = [prediction.median(STEP) if prediction else None for prediction in predictions]
    return {"predicted ms": predicted, "error": [row.error(STEP) for row in pairs]}


def _figures(records: Sequence[Record], asked: Sequence[str]) -> list[tuple[str, str, str]]:
    """Metric, statistic and heading of each column. A figure without spread needs no statistics."""
    units: dict[str, str] = {}
    has_spread: set[str] = set()
    for record in records:
        for name, sample in record.metrics.items():
            units[name] = sample.unit
            if sample.n > 1:
                has_spread.add(name)
    first = [name for name in FIRST if name in units]
    found = []
    for name in dict.fromkeys([*first, *units]):
        statistics: Sequence[str] = ("median",)
        if name in has_spread:
            statistics = asked or (("median", "range") if name == "step_ms" else statistics)
        for statistic in statistics:
            text = heading(name, units[name]) + LABELS.get(statistic, f" {statistic}")
            found.append((name, statistic, text))
    return found


def _cell(record: Record, metric: str, statistic: str) -> Any:
    """A figure of the record, or that it could not be measured."""
    if not is_measurable(record, metric):
        return NOT_MEASURABLE if statistic == "median" else None
    return figure(record.metrics.get(metric), statistic)


def figure(sample: Sample | None, statistic: str = "median") -> Any:
    """The statistic of a sample in the unit of its heading; None without a sample."""
    if sample is None:
        return None
    if statistic == "n":
        return sample.n
    if statistic == "range":
        return Range(*(scaled(end, sample.unit) or 0.0 for end in (sample.p10, sample.p90)))
    value = getattr(sample, statistic)
    return whole(value) if not sample.unit else scaled(float(value), sample.unit)


def _device(records: Sequence[Record]) -> str:
    """Where all were measured, if that was one kind of device."""
    known = {str(record.environment.get("device", "")) for record in records}
    measured = all(record.provenance == "measured" for record in records)
    return known.pop() if len(known) == 1 and measured else ""


def remark(record: Record) -> str:
    """Why the record has no figures, or what is to be known of those that it has."""
    if record.status != "ok":
        return f"{record.status.upper()}: {record.note}"
    brought = str(record.environment.get("optimizer", ""))
    own = [f"optimizer of the user's file: {brought[5:]}"] if brought.startswith("user ") else []
    disturbed = [describe_disturbance(record)] if is_disturbed(record) else []
    return "; ".join([*filter(None, [record.note]), *own, *fallbacks(record), *disturbed])


def remark_beside(row: Row) -> str:
    """The remark of a row, and what else is to be known of its prediction."""
    both = row.prediction is not None and row.prediction.note == row.record.note
    return "; ".join(filter(None, (remark(row.record), "" if both else caveat(row.prediction))))


def remarked(record: Record, records: Sequence[Record]) -> dict[str, str]:
    """The remark as a cell of a row, where any of the records has one."""
    return {"remark": remark(record)} if any(map(remark, records)) else {}


def is_measurable(record: Record, metric: str) -> bool:
    """Whether a figure stands for something: exposed time below zero is less than what the two
    steps repeat to that it is the difference of.
    """
    return not metric.endswith("exposed_ms") or (record.median(metric) or 0.0) >= 0


def plotted(record: Record, metric: str) -> float | None:
    """The median, Doubtful where the row was disturbed; None where it could not be measured."""
    value = record.median(metric) if is_measurable(record, metric) else None
    return Doubtful(value) if value is not None and is_disturbed(record) else value


def undisturbed(records: Sequence[Record]) -> tuple[list[Record], str]:
    """The rows whose medians hold, and what an answer begins with that leaves others out."""
    held = [record for record in records if not is_disturbed(record)]
    return held, "Of the undisturbed rows " if 0 < len(held) < len(records) else ""
