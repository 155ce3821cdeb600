"""Predictions are stored before their rows are run, and do not change afterwards."""

import dataclasses

import pytest

from stepgauge.report.views import record_table
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.predictions import AFTER, BEFORE
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore
from stepgauge.validate.predict_first import predict_before

BOX = HardwareFile(name="box")


def spec(size="nano", **fields):
    return StepSpec(model=ModelSpec.preset(size), size=size, **fields)


def row(spec, milliseconds, provenance):
    metrics = {"step_ms": Sample.exact(milliseconds, "ms")}
    return Record(
        kind="step", spec=dataclasses.asdict(spec), metrics=metrics, provenance=provenance
    )


@pytest.fixture
def takes(monkeypatch):
    """takes(7.0) sets the predicted time of a step to 7 ms. Size tiny has no prediction."""

    def set_to(milliseconds):
        def predicted(spec, hardware):
            if spec.size == "tiny":
                raise ValueError("tiny is not modelled")
            return row(spec, milliseconds, "modelled")

        monkeypatch.setattr("stepgauge.validate.predict_first.predicted", predicted)

    set_to(7.0)
    return set_to


@pytest.fixture
def store(tmp_path):
    run = RunStore(tmp_path)
    run.prepare()
    return run


def test_specs_without_a_prediction_are_counted_and_the_others_are_stored(store, takes):
    found = predict_before([spec(), spec("tiny"), spec("tiny", batch=2)], BOX, store)
    assert found.refused == {"tiny is not modelled": 2}
    assert (
        [record.note for record in store.read().records]
        == [BEFORE]
        == [record.note for record in found.records]
    )


def test_a_measured_row_keeps_its_earlier_prediction(store, takes):
    predict_before([spec()], BOX, store)
    store.append(row(spec(), 5.0, "measured"))
    takes(5.0)  # a new calibration
    found = predict_before([spec()], BOX, store)
    (kept,) = found.records
    assert found.num_outdated == 1
    assert kept.median("step_ms") == 7.0 and kept.note == BEFORE
    found = predict_before([spec()], BOX, store, fresh=True)
    (again,) = found.records
    assert found.num_outdated == 0
    assert again.median("step_ms") == 5.0  # the row is to be measured again


def test_a_prediction_made_after_the_measurement_is_marked(store, takes):
    store.append(row(spec(), 5.0, "measured"))
    (late,) = predict_before([spec()], BOX, store).records
    assert late.note == AFTER
    failed = dataclasses.replace(row(spec(batch=2), 5.0, "measured"), status="failed")
    store.append(failed)  # runs again
    assert predict_before([spec(batch=2)], BOX, store).records[0].note == BEFORE


def test_the_note_of_a_prediction_is_shown_in_its_row(store, monkeypatch):
    """A disturbed calibration makes predictions wrong by a multiple, so the row must say so."""
    busy = "the hardware file box was calibrated beside other work"
    made = dataclasses.replace(row(spec(), 7.0, "modelled"), note=busy)
    monkeypatch.setattr("stepgauge.validate.predict_first.predicted", lambda spec, hardware: made)
    (kept,) = predict_before([spec()], BOX, store).records
    assert kept.note == f"{BEFORE}; {busy}"
    late = dataclasses.replace(row(spec(), 5.0, "measured"), note="its own")
    table = record_table([kept, late])
    assert table.rows[0][list(table.columns).index("remark")] == f"its own; prediction: {busy}"
