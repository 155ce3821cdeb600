import dataclasses
import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgauge.spec.record import Record, Sample

values = st.lists(st.floats(min_value=1e-6, max_value=1e9), min_size=1, max_size=50)


@given(values)
def test_sample_is_ordered_and_within_its_values(numbers):
    sample = Sample.of(numbers, "ms")
    assert min(numbers) <= sample.p10 <= sample.median <= sample.p90 <= max(numbers)
    assert sample.median == statistics.median(numbers)
    assert sample.n == len(numbers)


def test_sample_by_hand():
    sample = Sample.of([4.0, 1.0, 3.0, 2.0, 5.0], "ms")
    assert (sample.mean, sample.median) == (3.0, 3.0)
    assert sample.std == pytest.approx(2.5**0.5)
    assert (sample.p10, sample.p90) == (pytest.approx(1.4), pytest.approx(4.6))


def test_no_values_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        Sample.of([], "ms")


@given(values, st.text(max_size=40))
def test_json_line_reads_back_equal(numbers, note):
    before = Record(
        kind="any",
        spec={"size": "small", "model": {"d_model": 768}},
        metrics={"step_ms": Sample.of(numbers, "ms")},
        series={"loss": numbers},
        note=note,
    )
    line = before.to_json()
    assert "\n" not in line
    assert Record.from_json(line) == before


@pytest.mark.parametrize(
    "line",
    [
        '{"schema": 1, "kind": "a", "spec": [1], "metrics": {}}',
        '{"schema": 1, "kind": "a", "spec": {}, "metrics": {}, "environment": null}',
        '{"schema": 1, "kind": 3, "spec": {}, "metrics": {}}',
        '{"schema": 1, "kind": "a", "spec": {}, "metrics": {}, "series": {"x": [NaN]}}',
        '{"schema": 1, "kind": "a", "spec": {}, "metrics": {"x": {"unit": "ms", "n": 1, "mean": "1", "std": 0, '
        '"median": 1, "p10": 1, "p90": 1}}}',
        "",
        "{",
        "[]",
        "{}",
        '{"schema": 99}',
        '{"schema": 1, "metrics": {}}',
        '{"schema": 1, "metrics": 3}',
    ],
)
def test_an_invalid_record_is_a_value_error(line):
    with pytest.raises(ValueError):
        Record.from_json(line)


def test_nan_is_not_written():
    record = Record(kind="step", spec={}, metrics={"x": Sample.exact(float("nan"), "ms")})
    with pytest.raises(ValueError):
        record.to_json()


def test_key_ignores_the_order_of_fields():
    first, second = Record(kind="a", spec={"x": 1, "y": 2}), Record(kind="a", spec={"y": 2, "x": 1})
    assert first.key == second.key != Record(kind="b", spec={"x": 1, "y": 2}).key
    assert json.loads(first.to_json())["schema"] == 1


def test_an_older_record_gets_the_defaults_of_new_fields():
    """A record from before StepSpec had `seconds` pairs with a newer one."""
    old = Record(kind="step", spec={"size": "small", "model": {"d_model": 768}})
    read = Record.from_json(old.to_json())
    assert read.spec["seconds"] == 1.0
    assert read.spec["model"]["norm"] == "rmsnorm"
    assert read.spec["model"]["d_model"] == 768
    other = Record(kind="elsewhere", spec={"x": 1})
    assert Record.from_json(other.to_json()) == other


def test_a_prediction_never_replaces_a_measurement():
    measured = Record(kind="step", spec={"batch": 4}, environment={"device": "NVIDIA H200"})
    modelled = dataclasses.replace(measured, provenance="modelled")
    elsewhere = dataclasses.replace(
        modelled, environment={"device": "NVIDIA H200", "hardware": "h200-pcie"}
    )
    published = dataclasses.replace(measured, provenance="published", source="S1")
    assert len({record.key for record in (measured, modelled, elsewhere, published)}) == 1
    assert len({record.identity for record in (measured, modelled, elsewhere, published)}) == 4


def test_removed_fields_are_dropped_from_older_records():
    spec = {"model": {}, "wrapper": "bucketed", "transport": "collectives", "max_ctas": 0}
    old = Record(kind="data-parallel", spec=spec)
    read = Record.from_json(old.to_json())
    assert "transport" not in read.spec and "max_ctas" not in read.spec
    other = Record(kind="data-parallel", spec={**spec, "transport": "peer-copies"})
    assert Record.from_json(other.to_json()).spec["transport"] == "peer-copies"
    trained = Record(kind="train", spec={"model": {}, "tokenizer": "bytes"})
    assert "tokenizer" not in Record.from_json(trained.to_json()).spec


def test_a_renamed_metric_is_read_under_its_new_name():
    old = Record(
        kind="data-parallel",
        spec={},
        metrics={"silent_step_ms": Sample.exact(3.0, "ms"), "step_ms": Sample.exact(4.0, "ms")},
    )
    read = Record.from_json(old.to_json())
    assert list(read.metrics) == ["without_communication_ms", "step_ms"]
    assert read.median("without_communication_ms") == 3.0
