"""Pairs measured records with their predictions, so that both are shown in one row."""

import dataclasses
from collections.abc import Sequence

from stepgauge.spec.record import Record

OLD = "predicted_"  # prefix of metrics in records from before predictions had their own
STEP = "step_ms"
BEFORE, AFTER = "predicted before it was measured", "predicted after it was measured"


@dataclasses.dataclass(frozen=True)
class Row:
    """A record and its prediction, if there is one. A record that is a prediction may be both."""

    record: Record
    prediction: Record | None = None

    @property
    def shown(self) -> Record:
        """The record with metrics: the prediction if the measurement failed."""
        return self.record if self.record.metrics else self.prediction or self.record

    def error(self, metric: str) -> float | None:
        """Returns predicted / measured - 1, or None if either has no such metric."""
        predicted = self.prediction.median(metric) if self.prediction else None
        measured = self.record.median(metric) if self.record.provenance == "measured" else None
        return predicted / measured - 1 if predicted and measured else None


def caveat(prediction: Record | None) -> str:
    """Returns the prediction's note without the fact that it was made before the measurement."""
    note = prediction.note if prediction else ""
    rest = note.removeprefix(BEFORE).lstrip("; ")
    return f"prediction: {rest}" if rest and note.startswith(BEFORE) else rest


def paired(records: Sequence[Record]) -> list[Row]:
    """Pairs each measured record with the prediction of the same spec in the same place.

    Predictions without a measurement are rows, too. The rows are in the order of the records.
    """
    rows: dict[tuple[str, ...], Row] = {}
    for record in records:
        identity = (record.key, *record.place)
        row = rows.get(identity)
        if record.provenance == "modelled":
            shown = row.record if row and row.record.provenance != "modelled" else record
            rows[identity] = Row(shown, record)
        else:
            rows[identity] = Row(record, row.prediction if row else None)
    return list(rows.values())


def pair_steps(records: Sequence[Record]) -> list[Row]:
    """Pairs each measured step with the last prediction of the same step for the same device.

    All other records are separate rows, except predictions of steps that were measured.
    """
    measured: dict[str, list[Record]] = {}
    modelled: dict[str, list[Record]] = {}
    for record in records:
        if record.provenance == "measured":
            measured.setdefault(record.key, []).append(record)
        elif record.provenance == "modelled" and STEP in record.metrics:
            modelled.setdefault(record.key, []).append(record)
    rows = []
    for record in records:
        prediction = None
        if record.provenance == "measured":
            predictions = [p for p in modelled.get(record.key, ()) if is_for(p, record)]
            prediction = predictions[-1] if predictions else None
        is_prediction = record.provenance == "modelled" and STEP in record.metrics
        if is_prediction and any(is_for(record, row) for row in measured.get(record.key, ())):
            continue
        rows.append(Row(record, prediction))
    return rows


def is_for(prediction: Record, measured: Record) -> bool:
    """Returns True unless the prediction is known to be for another device than the measured one."""
    devices = {r.environment.get("device") for r in (prediction, measured)} - {None, ""}
    return len(devices) <= 1


def without_predicted_metrics(record: Record) -> list[Record]:
    """Splits an older record that contains its prediction into a measured and a modelled record.

    Older measured records hold the prediction in metrics named predicted_*. Older rows that did not
    fit into memory hold the prediction in their place.
    """
    if not any(name.startswith(OLD) for name in record.metrics):
        return [record]
    metrics = {n: sample for n, sample in record.metrics.items() if not n.startswith(OLD)}
    if record.provenance == "modelled":
        prediction = dataclasses.replace(record, metrics=metrics, status="ok", note="")
        failed = dataclasses.replace(
            record, metrics={}, series={}, tables={}, provenance="measured"
        )
        return [prediction] if record.status == "ok" else [prediction, failed]
    predicted = {
        name.removeprefix(OLD): sample
        for name, sample in record.metrics.items()
        if name.startswith(OLD) and not name.endswith("_error")
    }
    prediction = dataclasses.replace(
        record, metrics=predicted, series={}, tables={}, provenance="modelled"
    )
    return [prediction, dataclasses.replace(record, metrics=metrics)]
