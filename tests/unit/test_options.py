"""Spec fields as options, and their product as specs."""

import dataclasses
from pathlib import Path

import pytest

from stepgauge.spec.options import expand, format_bytes, parse_bytes
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.spec.train import TrainSpec

REPOSITORY = Path(__file__).parents[2]


def test_combinations_come_in_the_order_of_the_values():
    specs = list(
        expand(
            StepSpec, {"size": ("nano", "tiny"), "precision": ("fp32", "bf16"), "vocab_size": (64,)}
        )
    )
    assert [(s.size, s.precision) for s in specs] == [
        ("nano", "fp32"),
        ("nano", "bf16"),
        ("tiny", "fp32"),
        ("tiny", "bf16"),
    ]
    assert {s.model.vocab_size for s in specs} == {64}
    assert [s.model.d_model for s in specs] == [64, 64, 128, 128]


def test_an_invalid_combination_is_an_error():
    with pytest.raises(ValueError, match="num_heads is 3, which does not divide d_model 64"):
        list(expand(StepSpec, {"size": ("nano",), "num_heads": (2, 3)}))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("batch", 0, "batch is 0; it must be at least 1"),
        ("batch", 10**9, "batch is 1,000,000,000; it must be at most"),
        ("precision", "fp8", "precision is 'fp8'; choose one of fp32"),
        ("steps", -5, "steps is -5; it must be at least 1"),
        ("seconds", float("nan"), "seconds is nan; it must be a finite number"),
    ],
)
def test_a_value_outside_its_limits_is_an_error(field, value, words):
    with pytest.raises(ValueError) as error:
        list(expand(StepSpec, {"size": ("nano",), field: (value,)}))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"siez": ("nano",)}, "no field 'siez': did you mean 'size'?"),
        ({"size": "nano", "zzz": 1}, "no field 'zzz': choose one of model, size, batch"),
        ({"batch": (4,)}, r"the network is missing: give 'size' \(nano, "),
        ({}, "the network is missing"),
    ],
)
def test_an_unknown_field_and_a_missing_network_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        expand(StepSpec, values)


def test_one_value_needs_no_tuple():
    (spec,) = expand(StepSpec, {"size": "nano", "batch": 2})
    assert (spec.size, spec.batch) == ("nano", 2)
    assert [s.size for s in expand(StepSpec, {"size": ["nano", "tiny"]})] == ["nano", "tiny"]


def test_learning_rate_warms_up_and_ends_at_the_final_fraction():
    (spec,) = expand(
        TrainSpec,
        {
            "size": ("nano",),
            "steps": (100,),
            "warmup": (10,),
            "final_learning_rate": (0.1,),
        },
    )
    rates = [spec.learning_rate_at(step, highest=1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[99] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[54] == pytest.approx(0.55, abs=0.02)  # half-way down the cosine


def test_expand_works_for_specs_without_a_model():
    @dataclasses.dataclass(frozen=True)
    class Copy:
        megabytes: int
        device: str = "cpu"

    assert list(expand(Copy, {"megabytes": (1, 2)})) == [Copy(1), Copy(2)]


def test_committed_records_can_still_be_read():
    """Scripts in benchmarks/ also write lines that are not records."""
    files = (REPOSITORY / "benchmarks" / "results").glob("*.jsonl")
    lines = [line for path in files for line in path.read_text().splitlines()]
    records = [Record.from_json(line) for line in lines if line.startswith('{"schema"')]
    assert len(records) > 1000
    assert all(record.environment and record.spec for record in records)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0"), (1000, "1000"), (3 << 10, "3K"), (1 << 20, "1M"), (1 << 30, "1G"), (2**40, "1024G")],
)
def test_sizes_are_read_as_they_are_written(size, text):
    assert format_bytes(size) == text
    assert parse_bytes(text, "size") == size
