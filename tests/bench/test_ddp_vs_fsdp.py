"""E11 on ranks of a CPU: rows over seeds become one, and the gap in memory is the share of the
others.
"""

import json

import pytest

from stepgauge.report.ddp_vs_fsdp import aggregated, gap_table
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.ddp_vs_fsdp import GlobalBatch
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore

SHAPE = ["--size", "bert-tiny", "--context", "8", "--vocab-size", "64", "--device", "cpu"]
COUNTS = ["--warmup", "1", "--steps", "2", "--seed", "1,2", "--global-batch", "4"]


def test_the_command_line(stepgauge, tmp_path):
    wrappers = ["--wrapper", "bucketed", "zero3"]
    status, out, err = stepgauge(
        "bench", "ddp-vs-fsdp", *SHAPE, *COUNTS, *wrappers, "--out", tmp_path
    )
    assert status == 0, err
    records = RunStore(tmp_path).read().records
    assert len(records) == 4
    # with defaults of its own network
    assert records == [Record.from_json(record.to_json()) for record in records]
    assert {record.spec["model"]["network"] for record in records} == {"bert"}
    assert "feed_forward" not in records[0].spec["model"]
    rows = json.loads((tmp_path / "ddp-vs-fsdp.json").read_text())
    assert [(row["wrapper"], row["global_batch"], row["seeds"]) for row in rows] == [
        ("bucketed", 4, [1, 2]),
        ("zero3", 4, [1, 2]),
    ]
    steps = [
        record.metrics["step_ms"].mean for record in records if record.spec["wrapper"] == "zero3"
    ]
    assert rows[1]["step_ms"]["mean"] == pytest.approx(sum(steps) / 2)
    assert rows[1]["step_ms"]["std"] == pytest.approx(abs(steps[0] - steps[1]) / 2**0.5)
    spec = BertSpec.preset("bert-tiny", context_length=8, vocab_size=64)
    assert rows[0]["parameter_bytes"] == 4 * spec.num_parameters
    assert rows[1]["parameter_bytes"] == pytest.approx(2 * spec.num_parameters, rel=0.03)
    assert "samples/s" in out
    assert "bucketed less zero3" in out


def test_what_cannot_be_is_said(stepgauge, tmp_path):
    status, _, err = stepgauge(
        "bench", "ddp-vs-fsdp", *SHAPE, "--ranks", "3", "--global-batch", "64"
    )
    assert (
        status,
        "global_batch is 64, which 3 ranks do not divide; choose a multiple of 3" in err,
    ) == (2, True)
    status, _, err = stepgauge("bench", "ddp-vs-fsdp", "--size", "small", "--device", "cpu")
    assert (status, "size is 'small'; choose one of bert-tiny" in err) == (2, True)
    with pytest.raises(ValueError, match=r"dropout is 0\.1; checkpointing would drop other values"):
        DataParallelSpec(model=BertSpec(dropout=0.1), checkpointing="blocks")
    with pytest.raises(ValueError, match="ranks is 1; sharding wants at least 2"):
        GlobalBatch().of_rank(1)
    with pytest.raises(ValueError, match="global_batch is 0; it must be at least 1"):
        GlobalBatch(global_batch=0)


def row(wrapper, peak, parts):
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "rest_bytes")
    load = {
        "size": "bert-base",
        "ranks": 4,
        "global_batch": 64,
        "context_length": 512,
        "precision": "fp32",
    }
    return {
        "wrapper": wrapper,
        **load,
        "peak_bytes": {"mean": peak, "std": 0.0},
        **dict(zip(names, parts, strict=True)),
    }


def test_the_gap_is_taken_apart():
    gib = 2**30
    whole, quarter = (4 * gib, 4 * gib, 8 * gib, 10 * gib), (gib, gib, 2 * gib, 11 * gib)
    table = gap_table([row("torch-ddp", 26 * gib, whole), row("torch-fsdp", 15 * gib, quarter)])
    gib_parts = [11.0, 12.0, 3.0, 3.0, 6.0, -1.0]
    assert table.rows == [["torch-ddp less torch-fsdp", 4, 64, *gib_parts]]
    assert aggregated([]) == []


def test_without_a_peak_of_tensors_the_gap_is_that_of_what_is_kept():
    rows = [row("torch-ddp", 26, (4 * 2**30,) * 4), row("torch-fsdp", 15, (2**30,) * 4)]
    for each in rows:
        del each["peak_bytes"], each["rest_bytes"]
    gib_parts = [None, 9.0, 3.0, 3.0, 3.0, None]
    assert gap_table(rows).rows == [["torch-ddp less torch-fsdp", 4, 64, *gib_parts]]
