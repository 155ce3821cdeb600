"""Bars of our kernels and their peers."""

import dataclasses

from stepgauge.report.kernel_plots import kernel_bars
from stepgauge.spec.kernel import AdamWSpec
from stepgauge.spec.record import Record, Sample


def row(times, extra=(), **fields):
    metrics = {f"{name}_ms": Sample.exact(ms, "ms") for name, ms in times.items()}
    metrics |= {f"{name}_extra_bytes": Sample.exact(n, "bytes") for name, n in dict(extra).items()}
    outcomes = dict.fromkeys(("ours", "torch", "foreach"), "ok")
    spec = dataclasses.asdict(AdamWSpec(**fields))
    return Record(kind="adamw", spec=spec, metrics=metrics, environment={"outcomes": outcomes})


def test_times_are_multiples_of_ours():
    (plot,) = kernel_bars(
        [row({"ours": 2.0, "torch": 3.0}), row({"ours": 4.0, "torch": 2.0}, layers=2)]
    )
    labels = [
        text for text in ("layers=4", "layers=2", "1.5", "0.5", "ours", "torch") if text in plot.svg
    ]
    assert len(labels) == 6
    assert "foreach" not in plot.svg  # it has no time


def test_memory_is_shown_if_any_implementation_needs_some_with_the_same_colours():
    none = {"ours": 0, "torch": 0}
    assert len(kernel_bars([row({"ours": 2.0, "torch": 3.0}, none)])) == 1
    time, memory = kernel_bars([row({"ours": 2.0, "torch": 3.0}, none | {"torch": 3 * 2**30})])
    assert "GiB" in memory.svg and "ours" in memory.svg
    assert memory.svg.count("series-2") == time.svg.count("series-2")


def test_a_row_without_our_time_has_no_bars():
    assert kernel_bars([row({"torch": 3.0})]) == []
