"""Predictions are on disk before their rows are run, and stay what they were."""

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


def row(asked, milliseconds, provenance):
    metrics = {"step_ms": Sample.exact(milliseconds, "ms")}
    return Record(
        kind="step", spec=dataclasses.asdict(asked), metrics=metrics, provenance=provenance
    )


@pytest.fixture
def takes(monkeypatch):
    """takes(7.0): from now on steps are predicted to take 7 ms, those of size tiny not at all."""

    def set_to(milliseconds):
        def predicted(asked, hardware):
            if asked.size == "tiny":
                raise ValueError("tiny is not modelled")
            return row(asked, milliseconds, "modelled")

        monkeypatch.setattr("stepgauge.validate.predict_first.predicted", predicted)

    set_to(7.0)
    return set_to


@pytest.fixture
def store(tmp_path):
    run = RunStore(tmp_path)
    run.prepare()
    return run


def test_what_cannot_be_predicted_is_counted_and_the_rest_written(store, takes):
    found = predict_before([spec(), spec("tiny"), spec("tiny", batch=2)], BOX, store)
    assert found.refused == {"tiny is not modelled": 2}
    assert (
        [record.note for record in store.read().records]
        == [BEFORE]
        == [record.note for record in found.records]
    )


def test_a_row_that_was_measured_keeps_the_prediction_that_was_made_before(store, takes):
    predict_before([spec()], BOX, store)
    store.append(row(spec(), 5.0, "measured"))
    takes(5.0)  # calibrated again, knowing more
    found = predict_before([spec()], BOX, store)
    (kept,) = found.records
    assert found.num_outdated == 1
    assert kept.median("step_ms") == 7.0 and kept.note == BEFORE
    found = predict_before([spec()], BOX, store, fresh=True)
    (again,) = found.records
    assert found.num_outdated == 0
    assert again.median("step_ms") == 5.0  # the row is to be measured again


def test_a_prediction_that_came_late_says_so(store, takes):
    store.append(row(spec(), 5.0, "measured"))
    (late,) = predict_before([spec()], BOX, store).records
    assert late.note == AFTER
    failed = dataclasses.replace(row(spec(batch=2), 5.0, "measured"), status="failed")
    store.append(failed)  # runs again
    assert predict_before([spec(batch=2)], BOX, store).records[0].note == BEFORE


def test_what_a_prediction_says_of_itself_stands_beside_the_row(store, monkeypatch):
    """A file calibrated beside other work is off by a multiple: without it the predictor would be."""
    busy = "the hardware file box was calibrated beside other work"
    made = dataclasses.replace(row(spec(), 7.0, "modelled"), note=busy)
    monkeypatch.setattr("stepgauge.validate.predict_first.predicted", lambda asked, hardware: made)
    (kept,) = predict_before([spec()], BOX, store).records
    assert kept.note == f"{BEFORE}; {busy}"
    late = dataclasses.replace(row(spec(), 5.0, "measured"), note="its own")
    table = record_table([kept, late])
    assert table.rows[0][list(table.columns).index("remark")] == f"its own; prediction: {busy}"
