"""Predictions that are on disk before their rows are run."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.predictions import AFTER, BEFORE, is_for
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore
from stepgauge.validate.predicted import predicted


class Predictions(NamedTuple):
    """The modelled records, and of each reason why a spec has none how many have it.

    num_outdated  records made before that differ from what the hardware file gives now
    """

    records: list[Record]
    refused: dict[str, int]
    num_outdated: int = 0


def predict_before(
    specs: Sequence[Any],
    hardware: HardwareFile,
    store: RunStore,
    *,
    fresh: bool = False,
    expected: Sequence[str] = (),
) -> Predictions:
    """Writes what is predicted of each row into the run, which the caller holds, with what it is
    expected to miss. A row that the run has measured already keeps the prediction that was made
    before; the prediction of one that had none says so.
    """
    found, num_outdated = Predictions([], {}), 0
    known = store.read().records
    for spec, miss in itertools.zip_longest(specs, expected, fillvalue=""):
        try:
            record = predicted(spec, hardware)
        except ValueError as error:
            found.refused[str(error)] = found.refused.get(str(error), 0) + 1
            continue
        measured = _last(known, "measured", record)
        is_done = measured is not None and measured.status != "failed" and not fresh
        before = _last(known, "modelled", record)
        if before is None or not is_done:
            note = "; ".join(filter(None, (AFTER if is_done else BEFORE, miss, record.note)))
            before = dataclasses.replace(record, note=note)
            store.append(before)
        num_outdated += before.metrics != record.metrics
        found.records.append(before)
    return found._replace(num_outdated=num_outdated)


def _last(records: Sequence[Record], provenance: str, like: Record) -> Record | None:
    """The last record of the same step on the same device."""
    found = [r for r in records if r.provenance == provenance and r.key == like.key]
    return next((record for record in reversed(found) if is_for(like, record)), None)
