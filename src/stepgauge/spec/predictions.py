"""A measured record and its prediction: two records of one thing asked, shown as one row."""

import dataclasses
from collections.abc import Sequence

from stepgauge.spec.record import Record

OLD = "predicted_"
STEP = "step_ms"
BEFORE, AFTER = "predicted before it was measured", "predicted after it was measured"


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing asked: its measurement, or the prediction where that is all, and the prediction."""

    record: Record
    prediction: Record | None = None

    @property
    def shown(self) -> Record:
        """The record with figures: of what did not fit, the prediction."""
        return self.record if self.record.metrics else self.prediction or self.record

    def error(self, metric: str) -> float | None:
        """Signed fraction by which the prediction is off, None where either has no such figure."""
        predicted = self.prediction.median(metric) if self.prediction else None
        measured = self.record.median(metric) if self.record.provenance == "measured" else None
        return predicted / measured - 1 if predicted and measured else None


def caveat(prediction: Record | None) -> str:
    """What is to be known of a prediction that stands beside a measurement, beyond that it was made
    in time; or "".
    """
    note = prediction.note if prediction else ""
    said = note.removeprefix(BEFORE).lstrip("; ")
    return f"prediction: {said}" if said and note.startswith(BEFORE) else said


def paired(records: Sequence[Record]) -> list[Row]:
    """Each measured record with the prediction of the same thing for the same place, and what is
    predicted alone, in the order of the records.
    """
    rows: dict[tuple[str, ...], Row] = {}
    for record in records:
        name = (record.key, *record.place)
        known = rows.get(name)
        if record.provenance == "modelled":
            shown = known.record if known and known.record.provenance != "modelled" else record
            rows[name] = Row(shown, record)
        else:
            rows[name] = Row(record, known.prediction if known else None)
    return list(rows.values())


def steps_beside(records: Sequence[Record]) -> list[Row]:
    """Each record; those of measured steps with the last prediction of the same step for the same
    device. Predictions of what was measured are no rows of their own.
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
        found = None
        if record.provenance == "measured":
            known = [p for p in modelled.get(record.key, ()) if is_for(p, record)]
            found = known[-1] if known else None
        is_prediction = record.provenance == "modelled" and STEP in record.metrics
        if is_prediction and any(is_for(record, row) for row in measured.get(record.key, ())):
            continue
        rows.append(Row(record, found))
    return rows


def is_for(prediction: Record, measured: Record) -> bool:
    """Whether the prediction is of the device that the row was measured on, as far as both are
    known.
    """
    predicted, here = (r.environment.get("device") for r in (prediction, measured))
    return not predicted or not here or predicted == here


def without_predicted_metrics(record: Record) -> list[Record]:
    """The record as what it was when predictions had no records of their own: metrics named
    predicted_* become a modelled record, and a row that did not fit is told apart from the
    prediction that it held.
    """
    if not any(name.startswith(OLD) for name in record.metrics):
        return [record]
    own = {n: sample for n, sample in record.metrics.items() if not n.startswith(OLD)}
    if record.provenance == "modelled":
        prediction = dataclasses.replace(record, metrics=own, status="ok", note="")
        lost = dataclasses.replace(record, metrics={}, series={}, tables={}, provenance="measured")
        return [prediction] if record.status == "ok" else [prediction, lost]
    figures = {
        name.removeprefix(OLD): sample
        for name, sample in record.metrics.items()
        if name.startswith(OLD) and not name.endswith("_error")
    }
    prediction = dataclasses.replace(
        record, metrics=figures, series={}, tables={}, provenance="modelled"
    )
    return [prediction, dataclasses.replace(record, metrics=own)]
