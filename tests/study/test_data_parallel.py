"""The model of a bucket sweep, and the plot of wrappers."""

import pytest

from stepgauge.report.bucket_sweep import Overhead, overhead_blocks
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.study.data_parallel import blocks


def test_the_fit_finds_the_parameters_of_a_synthetic_sweep():
    model = Overhead(base_ms=50.0, ms_per_byte=2e-6, per_bucket_ms=0.03)
    buckets, tails = [400, 80, 40, 8, 4, 1], [1e6, 5e6, 9e6, 4e7, 1e8, 5e8]
    steps = [model.step_ms(n, tail) for n, tail in zip(buckets, tails, strict=True)]
    fit = Overhead.fitted(buckets, tails, steps)
    assert fit.base_ms == pytest.approx(50)
    assert fit.ms_per_byte == pytest.approx(2e-6)
    assert fit.per_bucket_ms == pytest.approx(0.03)


def test_the_optimum_has_the_shortest_step():
    model = Overhead(base_ms=50.0, ms_per_byte=2e-6, per_bucket_ms=0.03)
    total = 4e8
    best = model.best_bytes(total)
    steps = [model.step_ms(total / size, size) for size in (0.9 * best, best, 1.1 * best)]
    assert min(steps) == steps[1]
    assert "optimum of the fit is 2.449 MB" in model.sentence(total, 5)


def test_plans_with_the_same_tail_do_not_determine_its_cost():
    fit = Overhead.fitted([131, 131, 130, 34], [1e8] * 4, [153.3, 153.8, 155.3, 163.3])
    assert fit.ms_per_byte == 0
    assert fit.best_bytes(1e10) is None
    assert fit.step_ms(34, 1e8) == pytest.approx(163.3, rel=1e-3)
    text = fit.sentence(1e10, 1)
    assert "All plans end with the same bucket" in text
    assert "has no optimum" in text


def test_rows_that_differ_in_more_than_the_bucket_size_are_no_sweep():
    def row(**spec):
        figures = {"step_ms": 10.0, "buckets": 4, "tail_bytes": 1e6, "gradient_bytes": 4e6}
        metrics = {name: Sample.exact(value, "") for name, value in figures.items()}
        fields = {"size": "tiny", "wrapper": "bucketed", "bucket_mb": 25.0, "seed": 0}
        return Record(kind="data-parallel", spec=fields | spec, metrics=metrics)

    seeds = [row(seed=seed) for seed in range(4)]
    assert overhead_blocks(seeds) == []
    sweep = [row(bucket_mb=mb) for mb in (1.0, 5.0, 10.0)]
    _, _, table = overhead_blocks([*sweep, *seeds])
    assert [cells[0] for cells in table.rows] == [1.0, 5.0, 10.0, 25.0]


def test_rows_with_another_reduce_type_or_bucket_size_have_their_own_bars():
    def row(step_ms, **spec):
        metrics = {"step_ms": Sample.exact(step_ms, "ms")}
        default = {"size": "tiny", "wrapper": "bucketed", "bucket_mb": DataParallelSpec.bucket_mb}
        return Record(kind="data-parallel", spec=default | spec, metrics=metrics)

    rows = [
        row(11.0),
        row(22.0, reduce_dtype="bf16"),
        row(33.0, bucket_mb=1.0),
    ]
    plot, *_ = blocks(rows)
    assert all(text in plot.svg for text in (">11", ">22", "bucketed bf16"))
    assert ">33" not in plot.svg
