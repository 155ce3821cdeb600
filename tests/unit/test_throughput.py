"""Rates of a step, by its time."""

import pytest

from stepgauge.spec.record import Sample
from stepgauge.spec.throughput import rate, throughput


@pytest.mark.parametrize("ms", [[10.0], [10.0, 14.0], [9.0, 10.0, 11.0, 30.0, 12.0]])
def test_a_rates_median_and_ends_are_those_of_the_time_turned_over(ms):
    """Of an even count the median of the rates is another: a reader divides by the median step."""
    step, found = Sample.of(ms, "ms"), rate(512, ms, "tokens")
    assert found.median == pytest.approx(512 / step.median * 1e3)
    assert found.p10 == pytest.approx(512 / step.p90 * 1e3)
    assert found.p90 == pytest.approx(512 / step.p10 * 1e3)
    assert found.unit == "tokens/s" and found.n == len(ms)


def test_there_are_the_rates_of_what_is_counted():
    assert throughput([10.0]) == {}
    found = throughput([10.0, 30.0], samples=4, tokens=64, flops=2e12, peak=4e14)
    assert {name: sample.median for name, sample in found.items()} == pytest.approx(
        {"samples_per_s": 200.0, "tokens_per_s": 3200.0, "tflop_per_s": 100.0, "mfu": 0.25}
    )
    assert "mfu" not in throughput([10.0], flops=2e12)
