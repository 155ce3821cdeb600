"""Throughput of a step."""

import pytest

from stepgauge.spec.record import Sample
from stepgauge.spec.throughput import rate, throughput


@pytest.mark.parametrize("ms", [[10.0], [10.0, 14.0], [9.0, 10.0, 11.0, 30.0, 12.0]])
def test_percentiles_of_a_rate_follow_from_those_of_the_time(ms):
    """With an even count, the median of the rates differs from the rate of the median time."""
    step, result = Sample.of(ms, "ms"), rate(512, ms, "tokens")
    assert result.median == pytest.approx(512 / step.median * 1e3)
    assert result.p10 == pytest.approx(512 / step.p90 * 1e3)
    assert result.p90 == pytest.approx(512 / step.p10 * 1e3)
    assert result.unit == "tokens/s" and result.n == len(ms)


def test_rates_exist_for_counts_above_zero():
    assert throughput([10.0]) == {}
    result = throughput([10.0, 30.0], samples=4, tokens=64, flops=2e12, peak=4e14)
    assert {name: sample.median for name, sample in result.items()} == pytest.approx(
        {"samples_per_s": 200.0, "tokens_per_s": 3200.0, "tflop_per_s": 100.0, "mfu": 0.25}
    )
    assert "mfu" not in throughput([10.0], flops=2e12)
