"""Experiment E11 on CPU ranks: rows of several seeds are merged, and the memory gap between DDP and
FSDP is the shards of the other ranks.
"""

import json

import pytest

from stepgauge.report.merge import merge_over
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.store import RunStore
from stepgauge.study.ddp_vs_fsdp import answer, blocks, gap_table

SHAPE = ["--size", "bert-tiny", "--context", "8", "--vocab-size", "64", "--device", "cpu"]
COUNTS = ["--warmup", "1", "--steps", "2", "--seed", "1,2", "--batch", "2"]


def test_the_command_line(stepgauge, tmp_path):
    wrappers = ["--wrapper", "bucketed", "zero3"]
    status, _, err = stepgauge(
        "bench", "data-parallel", *SHAPE, *COUNTS, *wrappers, "--out", tmp_path
    )
    assert status == 0, err
    records = RunStore(tmp_path).read().records
    assert len(records) == 4
    # read back with the defaults of BERT
    assert records == [Record.from_json(record.to_json()) for record in records]
    assert {record.spec["model"]["network"] for record in records} == {"bert"}
    assert "feed_forward" not in records[0].spec["model"]
    status, out, err = stepgauge("show", tmp_path, "--over", "seed", "--format", "json")
    assert status == 0, err
    plain, sharded = json.loads(out)
    assert (plain["spec"]["wrapper"], sharded["spec"]["wrapper"]) == ("bucketed", "zero3")
    assert plain["spec"]["seed"] == "1 2"
    steps = [
        record.metrics["step_ms"].mean for record in records if record.spec["wrapper"] == "zero3"
    ]
    assert sharded["metrics"]["step_ms"]["mean"] == pytest.approx(sum(steps) / 2)
    assert sharded["metrics"]["step_ms"]["std"] == pytest.approx(abs(steps[0] - steps[1]) / 2**0.5)
    spec = BertSpec.preset("bert-tiny", context_length=8, vocab_size=64)
    kept = [row["metrics"]["parameter_bytes"]["mean"] for row in (plain, sharded)]
    assert kept == [4 * spec.num_parameters, pytest.approx(2 * spec.num_parameters, rel=0.03)]
    table, gap, beside = blocks(records)
    assert "samples/s mean" in table.columns and "step ms std" in table.columns
    assert [row[:3] for row in gap.rows] == [["bucketed - zero3", 2, 4]]
    assert len(beside.rows) == 4
    status, out, err = stepgauge("show", tmp_path, "--over", "seed")
    assert status == 0 and "seed=1 2" in out and "std" in out
    status, _, err = stepgauge("show", tmp_path, "--over", "seeds")
    assert (status, "--over is 'seeds'; choose from " in err) == (2, True)


def test_bert_and_dropout():
    with pytest.raises(
        ValueError, match=r"dropout is 0\.1; with checkpointing, the recomputation would"
    ):
        DataParallelSpec(model=BertSpec(dropout=0.1), checkpointing="blocks")


def row(wrapper, seed=1, *, ranks=4, **gib):
    spec = {"wrapper": wrapper, "ranks": ranks, "batch": 16, "global_batch": 64, "seed": seed}
    metrics = {f"{n}_bytes": Sample.exact(value * 2**30, "bytes") for n, value in gib.items()}
    metrics["step_ms"] = Sample.exact(100.0 + seed, "ms")
    return Record(kind="data-parallel", spec=spec, metrics=metrics)


def test_the_gap_is_taken_apart():
    plain = row("torch-ddp", peak=26, parameter=4, gradient=4, optimizer=8, rest=10)
    sharded = row("torch-fsdp", peak=15, parameter=1, gradient=1, optimizer=2, rest=11)
    other = row("torch-fsdp", ranks=2, peak=15, parameter=1, gradient=1, optimizer=2, rest=11)
    table = gap_table([plain, other, sharded])
    gib_parts = [11.0, 12.0, 3.0, 3.0, 6.0, -1.0]
    assert table.rows == [["torch-ddp - torch-fsdp", 4, 64, *gib_parts]]
    assert gap_table([]).rows == []


def test_without_a_peak_of_tensors_the_gap_is_that_of_what_is_kept():
    plain, sharded = (
        row(wrapper, parameter=size, gradient=size, optimizer=size)
        for wrapper, size in (("torch-ddp", 4), ("torch-fsdp", 1))
    )
    assert gap_table([plain, sharded]).rows == [
        ["torch-ddp - torch-fsdp", 4, 64, None, 9.0, 3.0, 3.0, 3.0, None]
    ]


def test_times_are_over_the_field_and_bytes_over_ranks_too():
    rows = [row("zero3", seed, peak=seed) for seed in (1, 2, 3)]
    rows[0].series["rank_peak_bytes"] = [1.0 * 2**30, 3.0 * 2**30]
    failed = Record(kind="data-parallel", spec=rows[0].spec, status="failed")
    (together,) = merge_over([*rows, failed], "seed")
    assert together.metrics["step_ms"] == Sample.of([101.0, 102.0, 103.0], "ms")
    assert together.metrics["peak_bytes"].n == 4
    assert len(merge_over(rows, "wrapper")) == 3


@pytest.fixture
def measured():
    """measured(wrapper, spread=1.0, **fields): a row over 2 ranks as bench gives it."""

    def make(wrapper, *, spread=1.0, batch=2, **fields):
        spec = DataParallelSpec(
            model=BertSpec.preset("bert-tiny"), size="bert-tiny", wrapper=wrapper, ranks=2,
            batch=batch,
        )  # fmt: skip
        step, tokens = Sample.of([10, 10 * spread], "ms"), Sample.exact(1e3, "tokens/s")
        return Record.of(spec, **{"metrics": {"step_ms": step, "tokens_per_s": tokens}, **fields})

    return make


def test_a_row_that_failed_is_named_with_its_reason_and_not_called_disturbed(measured):
    failed = measured("torch-fsdp", status="failed", note="no such backend", metrics={})
    rows = [measured("torch-ddp"), failed]
    assert answer(rows) == (
        "torch-ddp and torch-fsdp cannot be compared: torch-fsdp was not measured."
    )
    text, table, *_ = blocks(rows)
    assert "FAILED: no such backend" in text.text and len(table.rows) == 1
    assert len(blocks([failed])) == 1


def test_the_largest_batch_that_both_have_is_compared_and_disturbed_rows_are_called_so(measured):
    rows = [measured(name) for name in ("torch-ddp", "torch-fsdp")]
    larger = measured("torch-fsdp", batch=4)
    assert answer([*rows, larger]).startswith("At a global batch of 4, torch-fsdp takes 1.00 × ")
    spread = [measured("torch-ddp"), measured("torch-fsdp", spread=2.0)]
    assert answer(spread).endswith("cannot be compared: rows were disturbed.")
    apart = [measured("torch-ddp"), measured("torch-fsdp", batch=4)]
    assert answer(apart).endswith("they were not measured at the same global batch.")
