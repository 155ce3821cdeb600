"""Rows of `bench layout`: their metrics, and what a report says about them."""

import dataclasses
import re

import pytest

from stepgauge.bench import layout as bench
from stepgauge.bench.ranks import require_ranks
from stepgauge.bench.sweep import Job, sweep
from stepgauge.report.layout import layout_answer
from stepgauge.report.run_page import run_page
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.store import RunStore

LAYOUTS = ("dp2 bucketed", "tp2", "pp2 1f1b m2", "dp2 zero3")


def spec(layout, **changes):
    model = ModelSpec.preset("nano", context_length=16, vocab_size=64)
    return LayoutSpec(
        **{"model": model, "size": "nano", "layout": layout, "batch": 4, "steps": 2, **changes}
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Returns the records by layout. The one with tensor parallelism accumulates two batches."""
    specs = [
        spec(each, warmup=1, accumulation=2 if each == "tp2" else 1, balance="time")
        for each in LAYOUTS
    ]
    store = RunStore(tmp_path_factory.mktemp("rows"))
    done = sweep([Job(bench.ON_RANKS, each) for each in specs], store)
    return {outcome.job.spec.layout: outcome.record for outcome in done}


def test_the_phases_of_every_row_add_up(rows):
    for layout, row in rows.items():
        assert row.status == "ok", (layout, row.note)
        mixed = {"forward_and_backward_ms"} & set(row.metrics)
        assert bool(mixed) == (layout in ("tp2", "pp2 1f1b m2"))
        phases = sorted(mixed or {"forward_ms", "backward_ms"})
        parts = sum(row.median(name) for name in [*phases, "optimizer_ms"])
        assert 0.5 < parts / row.median("step_ms") < 2
        assert len(row.series["rank_step_ms"]) == 2
        assert row.median("parameter_bytes") > 0 < row.median("optimizer_bytes")
    weights = {layout: row.median("parameter_bytes") for layout, row in rows.items()}
    for cut in ("tp2", "pp2 1f1b m2", "dp2 zero3"):
        assert weights[cut] < 0.8 * weights["dp2 bucketed"], "a rank has only its shard"


def test_parallel_blocks_are_timed_whole(tmp_path):
    """Stages are cut by half blocks, but a parallel block cannot be built in halves."""
    layout = spec("pp2 1f1b m2", warmup=1, balance="step")
    layout = dataclasses.replace(layout, model=dataclasses.replace(layout.model, block="parallel"))
    (row,) = [done.record for done in sweep([Job(bench.ON_RANKS, layout)], RunStore(tmp_path))]
    assert row.status == "ok", row.note
    assert "for the shortest step by measured time" in row.note


def test_exposed_communication_is_measured_for_axes_that_allow_it(rows):
    def measured(axis):
        return [layout for layout, row in rows.items() if f"{axis}_exposed_ms" in row.metrics]

    assert measured("data") == ["dp2 bucketed"]
    assert measured("tensor") == ["tp2"]
    assert measured("pipeline") == ["pp2 1f1b m2"]
    assert rows["dp2 zero3"].note.startswith("data exposed is not measured: zero3")
    pipeline = rows["pp2 1f1b m2"]
    assert pipeline.median("pipeline_exposed_ms") == pytest.approx(
        pipeline.median("forward_and_backward_ms") - pipeline.median("busiest_rank_ms")
    )
    spans = pipeline.tables["spans"]
    assert len(spans) == 1 + 2 * 2 * 2  # ranks, micro-batches, forward and backward
    assert re.fullmatch(r"stages of \d, \d blocks, by measured time", pipeline.note)


def test_the_page_draws_them_and_names_the_fastest(rows, tmp_path):
    page = run_page(list(rows.values()), tmp_path).html()
    assert "Which layout trains fastest" in page
    assert "Step time by axis." in page
    assert "is the fastest: " in page or "all rows were disturbed" in page


def row(layout, step_ms, *, changes=(), **exposed):
    metrics = {"step_ms": step_ms, **{f"{axis}_exposed_ms": ms for axis, ms in exposed.items()}}
    samples = {name: Sample.exact(ms, "ms") for name, ms in metrics.items()}
    asked = dataclasses.asdict(spec(layout, accumulation=1, **dict(changes)))
    return Record(kind="layout", spec=asked, metrics=samples)


def test_the_answer_names_a_custom_network_by_what_differs():
    def custom(layout, step_ms, layers):
        model = ModelSpec.preset("nano", num_layers=layers)
        return row(layout, step_ms, changes={"model": model, "size": "custom"})

    rows = [custom("none", 20.0, 4), custom("dp2 bucketed", 12.0, 4)]
    assert layout_answer(rows).startswith("Layout 'dp2 bucketed' is the fastest: 12.00 ms")
    deep = [custom("none", 40.0, 8), custom("dp2 bucketed", 30.0, 8)]
    said = layout_answer([*rows, *deep])
    assert said.startswith("At num_layers=8, layout 'dp2 bucketed' is the fastest: 30.00 ms")


def test_the_answer_gives_the_exposed_times_of_all_layouts():
    rows = [
        row("none", 20.0),
        row("dp2 bucketed", 12.0, data=2.0),
        row("tp2", 16.0, tensor=6.0),
        row("pp2 1f1b m2", 14.0, pipeline=-1.0),
    ]
    said = layout_answer(rows)
    assert said.startswith("At size=nano, layout")
    assert (
        "'dp2 bucketed' is the fastest: 12.00 ms per step, 1.67 × as fast as one process. " in said
    )
    assert "take 2.000 ms of it, and 6.000 ms with 'tp2' and 0 ms with 'pp2 1f1b m2'." in said
    rows[0] = row("none", 10.0)
    assert "does not communicate; exposed communication and waiting take 2" in layout_answer(rows)


def test_missing_gpus_are_reported_before_ranks_are_started():
    with pytest.raises(ValueError, match="ranks is 2; this machine has"):
        require_ranks(spec("tp2", device="cuda"))
