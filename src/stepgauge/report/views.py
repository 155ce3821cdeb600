"""Makes the table of any set of records: its columns, figures and remarks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stepgauge.report.names import flatten, identifying_fields, shared_values
from stepgauge.report.numbers import Doubtful, heading, scaled, whole
from stepgauge.report.table import REMARK, SEPARATOR, Range, Table
from stepgauge.spec.disturbance import describe_disturbance, is_disturbed
from stepgauge.spec.fallbacks import fallbacks
from stepgauge.spec.predictions import STEP, Row, caveat, pair_steps
from stepgauge.spec.record import Record, Sample

STATISTICS = ("median", "range", "p10", "p90", "mean", "std", "n")
LABELS = {"median": "", "range": " p10 – p90"}
FIRST = (
    *("step_ms", "spread", "time_ms", "exposed_ms"),
    *("data_exposed_ms", "tensor_exposed_ms", "pipeline_exposed_ms"),
    *("mfu", "peak_bytes", "samples_per_s", "tokens_per_s"),
)  # the figures that readers look for come first
PREDICTED_FOR = "predicted for"  # a column, and part of a caption
NOT_MEASURABLE = "not measurable here"  # exposed time that is only noise


def record_table(
    records: Sequence[Record], *, statistics: Sequence[str] = (), first: Sequence[str] = ()
) -> Table:
    """Returns one row per record: the fields that tell it apart, its figures and a remark.

    statistics  columns of each figure; default: the median, and for the whole step also the range
    first       spec fields that come first
    """
    rows_with_predictions = pair_steps(records)
    records = [row.record for row in rows_with_predictions]
    shared = shared_values(records)
    provenance = _provenance(records)
    fields = [*first, *identifying_fields(records), *provenance, *shared.fields]
    fields = list(dict.fromkeys(fields))
    figures = _figures(records, statistics)
    predictions = _predictions(rows_with_predictions)
    remarks = [remark_with_prediction(row) for row in rows_with_predictions]
    rows = []
    for place, record in enumerate(records):
        spec = flatten(record.spec) | {name: values[place] for name, values in provenance.items()}
        cells = [spec.get(name) for name in fields]
        cells += [values[place] for values in predictions.values()]
        cells += [_cell(record, name, statistic) for name, statistic, _ in figures]
        rows.append(cells + ([remarks[place]] if any(remarks) else []))
    headings = [*predictions, *(text for _, _, text in figures)]
    names = [name.replace("_", " ") for name in fields]
    return Table(
        [*names, *headings, *([REMARK] if any(remarks) else [])],
        rows,
        numeric=frozenset(headings),
        caption=_caption(records, shared.text),
        hidden=frozenset({*shared.columns(), *_shared_machine(provenance)}),
        names=len(fields),
        formats={"error": "+.1%", "± %": ".0f"},
    )


def _provenance(records: Sequence[Record]) -> dict[str, list[str]]:
    """Returns the columns that tell rows apart but are no spec fields: whether a row was measured, on
    which device, and for which machine it was predicted. Measured rows that have the same need none.
    """
    columns: dict[str, list[str]] = {}
    if len({record.provenance for record in records}) > 1:
        columns["provenance"] = [record.provenance for record in records]
    devices = [
        str(record.environment.get("device", "")) if record.provenance == "measured" else ""
        for record in records
    ]
    if len({device for device in devices if device}) > 1:
        columns["measured on"] = devices
    machines = _predicted_for(records)
    if (machines and all(machines)) or len({machine for machine in machines if machine}) > 1:
        columns[PREDICTED_FOR] = machines
    return columns


def _predicted_for(records: Sequence[Record]) -> list[str]:
    """Returns the name of each prediction's hardware file; "" for other rows."""
    return [
        str(record.environment.get("hardware", "")) if record.provenance == "modelled" else ""
        for record in records
    ]


def _shared_machine(provenance: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the column of the machine if the caption names it, because all rows are for it."""
    return [PREDICTED_FOR] if len(set(provenance.get(PREDICTED_FOR, []))) == 1 else []


def _caption(records: Sequence[Record], shared: str) -> str:
    """Returns what all rows share, and the machine on which or for which they all were obtained."""
    machines = set(_predicted_for(records))
    if len(machines) == 1 and "" not in machines:
        return ", ".join(filter(None, (shared, f"{PREDICTED_FOR} {machines.pop()}")))
    return " on ".join(filter(None, (shared, _device(records))))


def _predictions(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Returns columns of the predicted step time and its signed error, if any step was predicted."""
    predictions = [row.prediction for row in rows]
    if not any(predictions):
        return {}
    predicted = [prediction.median(STEP) if prediction else None for prediction in predictions]
    return {"predicted ms": predicted, "error": [row.error(STEP) for row in rows]}


def _figures(records: Sequence[Record], requested: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns metric, statistic and heading of each column. A metric that was measured once has only
    its value.
    """
    units: dict[str, str] = {}
    has_spread: set[str] = set()
    for record in records:
        for name, sample in record.metrics.items():
            units[name] = sample.unit
            if sample.n > 1:
                has_spread.add(name)
    first = [name for name in FIRST if name in units]
    columns = []
    for name in dict.fromkeys([*first, *units]):
        statistics: Sequence[str] = ("median",)
        if name in has_spread:
            statistics = requested or (("median", "range") if name == "step_ms" else statistics)
        for statistic in statistics:
            text = heading(name, units[name]) + LABELS.get(statistic, f" {statistic}")
            columns.append((name, statistic, text))
    return columns


def _cell(record: Record, metric: str, statistic: str) -> Any:
    if not is_measurable(record, metric):
        return NOT_MEASURABLE if statistic == "median" else None
    return figure(record.metrics.get(metric), statistic)


def figure(sample: Sample | None, statistic: str = "median") -> Any:
    """Returns the statistic in the unit of its heading, or None if there is no sample."""
    if sample is None:
        return None
    if statistic == "n":
        return sample.n
    if statistic == "range":
        return Range(*(scaled(end, sample.unit) or 0.0 for end in (sample.p10, sample.p90)))
    value = getattr(sample, statistic)
    return whole(value) if not sample.unit else scaled(float(value), sample.unit)


def _device(records: Sequence[Record]) -> str:
    """Returns the device's name if all records were measured on one kind of device, else ""."""
    devices = {str(record.environment.get("device", "")) for record in records}
    measured = all(record.provenance == "measured" for record in records)
    return devices.pop() if len(devices) == 1 and measured else ""


def remark(record: Record) -> str:
    """Returns why the record has no figures, or a note on its figures: fallbacks and disturbances."""
    if record.status != "ok":
        return f"{record.status.upper()}: {record.note}"
    optimizer = str(record.environment.get("optimizer", ""))
    is_users = optimizer.startswith("user ")
    return SEPARATOR.join([
        *([record.note] if record.note else []),
        *([f"optimizer of the user's file: {optimizer[5:]}"] if is_users else []),
        *fallbacks(record),
        *([describe_disturbance(record)] if is_disturbed(record) else []),
    ])  # fmt: skip


def remark_with_prediction(row: Row) -> str:
    """Returns the remark on a row and on its prediction."""
    is_same = row.prediction is not None and row.prediction.note == row.record.note
    parts = remark(row.record), "" if is_same else caveat(row.prediction)
    return SEPARATOR.join(filter(None, parts))


def remark_cell(record: Record, records: Sequence[Record]) -> dict[str, str]:
    """Returns the record's remark as a cell, or nothing if no record has a remark."""
    return {REMARK: remark(record)} if any(map(remark, records)) else {}


def is_measurable(record: Record, metric: str) -> bool:
    """False for an exposed time that is only noise. It is the difference of two steps, so that noise
    may bring it below zero.

    On a CPU it may also exceed all communication, because ranks compete for cores. On GPUs that is a
    result: communication slows the kernels that run at the same time.
    """
    exposed = record.median(metric) or 0.0
    if not metric.endswith("exposed_ms") or exposed < 0:
        return not metric.endswith("exposed_ms")
    is_cpu = str(record.spec.get("device", "")).startswith("cpu")
    communication = record.median("communication_ms")
    is_measured = record.provenance == "measured"
    return not (is_cpu and is_measured and communication is not None and exposed > communication)


def plotted(record: Record, metric: str) -> float | None:
    """Returns the median: Doubtful if the row was disturbed, None if it was not measurable."""
    value = record.median(metric) if is_measurable(record, metric) else None
    return Doubtful(value) if value is not None and is_disturbed(record) else value


class Undisturbed(NamedTuple):
    """The rows that an answer may use.

    among     the words with which the answer begins if it ignores others
    why_none  why there are no rows; "" if there are
    """

    rows: list[Record]
    among: str
    why_none: str


def undisturbed(records: Sequence[Record]) -> Undisturbed:
    rows = [record for record in records if not is_disturbed(record)]
    if rows:
        return Undisturbed(
            rows, "Of the undisturbed rows, " if len(rows) < len(records) else "", ""
        )
    return Undisturbed([], "", "all rows were disturbed" if records else "no row has a figure")
