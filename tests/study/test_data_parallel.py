"""The overhead model finds what a sweep was made of."""

import pytest

from stepgauge.study.data_parallel import Overhead


def test_the_fit_finds_what_the_sweep_was_made_of():
    made = Overhead(base_ms=50.0, ms_per_byte=2e-6, per_bucket_ms=0.03)
    buckets, tails = [400, 80, 40, 8, 4, 1], [1e6, 5e6, 9e6, 4e7, 1e8, 5e8]
    found = Overhead.fitted(buckets, tails, [made.step_ms(n, tail) for n, tail in zip(buckets, tails, strict=True)])
    assert found.base_ms == pytest.approx(50)
    assert found.ms_per_byte == pytest.approx(2e-6)
    assert found.per_bucket_ms == pytest.approx(0.03)
