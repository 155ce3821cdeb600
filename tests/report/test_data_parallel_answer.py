"""The answer to which data parallel wrapper is the fastest."""

from stepgauge.report.kinds import answer
from stepgauge.spec.record import Record, Sample


def row(size, wrapper, step_ms, gradient_bytes):
    metrics = {
        "step_ms": Sample.exact(step_ms, "ms"),
        "gradient_bytes": Sample.exact(gradient_bytes, "B"),
    }
    spec = {"size": size, "wrapper": wrapper, "ranks": 2, "batch": 4}
    return Record(kind="data-parallel", spec=spec, metrics=metrics)


def test_wrappers_whose_ranks_hold_half_of_the_gradients_count_for_the_largest_network():
    large = [row("large", "none", 100.0, 8e9), row("large", "zero3", 105.0, 4e9)]
    text = answer([*large, row("small", "bucketed", 10.0, 5e9)])
    assert (
        "on 2 ranks, zero3 is the fastest: 105.0 ms per step, 1.05 × the time of a single" in text
    )
