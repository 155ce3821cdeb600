"""Stores predictions before their rows are run."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.predictions import AFTER, BEFORE, is_for
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore
from stepgauge.validate.predicted import predicted


class Predictions(NamedTuple):
    """Predictions of a list of specs.

    records       modelled records
    refused       why specs have none: the number of specs by reason
    num_outdated  how many records were made earlier and differ from a prediction made now
    """

    records: list[Record]
    refused: dict[str, int]
    num_outdated: int = 0


def predict_before(
    specs: Iterable[Any],
    hardware: HardwareFile,
    store: RunStore,
    *,
    fresh: bool = False,
    expected: Sequence[str] = (),
) -> Predictions:
    """Predicts each spec and appends the record to the run, whose lock the caller holds.

    A row that the run has measured already keeps its earlier prediction. If it has none, the new one is
    marked as made afterwards. `expected` are notes on why a prediction may be off, one per spec.
    """
    predictions, num_outdated = Predictions([], {}), 0
    stored = store.read().records
    for spec, expectation in itertools.zip_longest(specs, expected, fillvalue=""):
        try:
            current = predicted(spec, hardware)
        except ValueError as error:
            predictions.refused[str(error)] = predictions.refused.get(str(error), 0) + 1
            continue
        measured = _last(stored, "measured", current)
        is_done = measured is not None and measured.status != "failed" and not fresh
        record = _last(stored, "modelled", current)
        if record is None or not is_done:
            notes = AFTER if is_done else BEFORE, expectation, current.note
            record = dataclasses.replace(current, note="; ".join(filter(None, notes)))
            store.append(record)
        num_outdated += record.metrics != current.metrics
        predictions.records.append(record)
    return predictions._replace(num_outdated=num_outdated)


def _last(records: Sequence[Record], provenance: str, like: Record) -> Record | None:
    """Returns the last record of the same step on the same device."""
    return next(
        (
            record
            for record in reversed(records)
            if record.provenance == provenance and record.key == like.key and is_for(like, record)
        ),
        None,
    )
