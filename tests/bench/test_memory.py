"""Predicted and measured memory on a CPU: the two records of a spec, and their tables."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from stepgauge.bench.memory import check, jobs, measure, predicted
from stepgauge.report.checkpointing import block_bytes
from stepgauge.report.memory import kept_tables, memory_tables, summary_table
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.predictions import paired
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.store import RunStore
from stepgauge.spec.user_model import UserModel

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
SPEC = MemorySpec(
    model=ModelSpec(
        vocab_size=256, context_length=64, d_model=64, d_ff=128, num_layers=4, num_heads=2
    ),
    batch=4,
)
MINE = UserModel(file="x.py", factory="f", content="")


@functools.cache
def tracked(precision="fp32", checkpointing="none", size=1):
    return measure(with_checkpoints(precision, checkpointing, size))


def with_checkpoints(precision, checkpointing, size):
    fields = {"precision": precision, "checkpointing": checkpointing, "checkpoint_blocks": size}
    return dataclasses.replace(SPEC, **fields)


@pytest.mark.parametrize(
    ("checkpointing", "size"),
    [("none", 1), ("blocks", 1), ("blocks", 2), ("nested", 2), ("selective", 1)],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_cpu_the_prediction_equals_the_measurement(precision, checkpointing, size):
    record = tracked(precision, checkpointing, size)
    (row,) = paired([predicted(with_checkpoints(precision, checkpointing, size)), record])
    assert row.error("peak_bytes") == row.error("forward_only_peak_bytes") == 0
    parts = ("parameters", "optimizer_state", "gradients", "activations", "temporaries", "other")
    assert sum(record.median(f"{name}_bytes") for name in parts) == record.median("peak_bytes")
    assert record.median("parameters_bytes") == SPEC.model.num_parameters * 4
    assert record.median("backward_peak_bytes") <= record.median("peak_bytes")
    assert max(map(sum, zip(*(record.series[n] for n in parts), strict=True))) == record.median(
        "peak_bytes"
    )
    assert Record.from_json(record.to_json()) == record


def test_checkpointing_keeps_the_expected_bytes():
    choices = (("none", 1), ("blocks", 1), ("blocks", 2), ("selective", 1))
    records = [tracked("fp32", name, size) for name, size in choices]
    kept = [record.median("saved_for_backward_bytes") for record in records]
    assert kept[0] > kept[3] > kept[1] > kept[2]
    stream = SPEC.model.residual_stream_bytes(batch=4, sequence=64)
    sizes = block_bytes(records)
    assert sizes.boundary == stream
    assert kept[1] - kept[2] == 2 * stream  # the inputs of four blocks, compared with two parts


def test_the_best_number_of_blocks_per_part_is_optimal():
    sizes = block_bytes([tracked("fp32", name, 1) for name in ("none", "blocks")])
    best = sizes.best(36)
    assert sizes.kept(36, best) == min(sizes.kept(36, k) for k in range(1, 37))
    assert sizes.best(36, "nested") == 6


def predicted_for_cpu():
    return predicted(dataclasses.replace(SPEC, predict="cpu"))


def test_a_row_that_ran_out_of_memory_is_shown_with_its_prediction(monkeypatch):
    monkeypatch.setattr("stepgauge.measure.devices.available_host_bytes", lambda: 10_000)
    with pytest.raises(MemoryError, match="needs at least"):
        measure(SPEC)
    prediction = predicted(SPEC)
    lost = dataclasses.replace(
        prediction, provenance="measured", metrics={}, tables={}, status="oom", note="too large"
    )
    table = summary_table([predicted_for_cpu(), prediction, lost])
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["figures"] for row in rows] == ["predicted", "predicted"]
    assert "peak MiB" not in table.columns
    assert rows[0]["predicted peak MiB"] == rows[1]["predicted peak MiB"] is not None
    assert rows[1]["remark"] == "OOM: too large"


def test_a_prediction_stands_beside_what_was_measured():
    table = summary_table([predicted(SPEC), tracked(), predicted_for_cpu()])
    measured, alone = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (measured["figures"], alone["figures"]) == ("measured", "predicted")
    assert measured["peak MiB"] == measured["predicted peak MiB"] == alone["predicted peak MiB"]
    assert not alone["peak MiB"]


def test_a_spec_has_a_modelled_and_a_measured_record():
    asked = [(job.pending.provenance, job.spec) for job in jobs(SPEC)]
    assert asked == [("modelled", SPEC), ("measured", SPEC)]
    alone = dataclasses.replace(SPEC, predict="sm90")
    assert [job.pending.provenance for job in jobs(alone)] == ["modelled"]
    assert [job.pending.provenance for job in jobs(dataclasses.replace(SPEC, compile="on"))] == [
        "measured"
    ]


def test_records_that_held_their_prediction_are_read_as_two(tmp_path):
    old = "2026-11-21-h200-memory.jsonl"
    (tmp_path / "records.jsonl").write_text((RESULTS / old).read_text())
    rows = paired(RunStore(tmp_path).read().latest())
    errors = [error for row in rows if (error := row.error("peak_bytes")) is not None]
    assert len(errors) == 39 and 0.004 < max(map(abs, errors)) < 0.005
    names = {name for row in rows for name in row.shown.metrics}
    assert not any(name.startswith("predicted") for name in names)


def test_a_prediction_says_what_holds_it():
    small = predicted_for_cpu()
    small.spec["predict"] = "sm90"
    peak = {"peak_bytes": Sample.exact(2**40, "bytes")}
    huge = dataclasses.replace(small, metrics=peak, spec={**small.spec, "batch": 99})
    table = summary_table([small, huge])
    assert [row[table.columns.index("fits")] for row in table.rows] == [
        "H100 80GB HBM3",
        "no: the largest, H200, has 141 GB",
    ]
    seen = table.for_display()
    assert "fits" in [seen.columns[place] for place in seen.name_columns()]  # however narrow it is
    assert "fits" not in summary_table([tracked()]).columns


def test_rows_are_named_in_words_for_people_and_by_fields_for_machines():
    table = summary_table([tracked(), predicted_for_cpu()])
    assert table.for_display().columns[:2] == ["row", "figures"] and {"precision", "predict"} <= {
        *table.columns
    }
    assert [row[0] for row in table.rows] == ["predict=no", "predict=cpu"]
    assert "precision=fp32" in table.caption


def test_an_own_model_is_tracked(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def factory():\n"
        "    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), (torch.ones(8, 32),)\n"
    )
    spec = dataclasses.replace(SPEC, model=UserModel.read(f"{file}:factory"))
    record = measure(spec)
    assert record.median("peak_bytes") == predicted(spec).median("peak_bytes")
    assert [row[0] for row in record.tables["saved_by_block"][1:]] == [
        "0",
        "1",
        "2",
    ] or record.tables["savers"][1:]
    assert all(table.rows and table.caption for table in memory_tables(record))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"predict": "sm70"}, "predict is 'sm70'; choose one of no, cpu, sm80, sm90"),
        ({"phases": "forward"}, "phases is 'forward'"),
        ({"model": MINE, "checkpointing": "blocks"}, "a user's model chooses its own"),
        ({"compile": "on", "predict": "sm90"}, "cannot be predicted: choose off"),
        ({"compile": "blocks", "checkpointing": "nested"}, "can be tracked on CUDA only"),
    ],
)
def test_what_cannot_be_asked_is_said(fields, said):
    with pytest.raises(ValueError, match=r".") as error:
        check(dataclasses.replace(SPEC, **fields))
    assert said in str(error.value)


def test_a_compiled_step_on_a_cpu_has_kept_bytes_but_no_peak():
    shallow = dataclasses.replace(SPEC, model=dataclasses.replace(SPEC.model, num_layers=1))
    eager, compiled = (
        measure(dataclasses.replace(shallow, compile=mode)) for mode in ("off", "on")
    )
    assert "peak_bytes" not in compiled.metrics
    assert "the peak is not seen" in compiled.note
    assert (
        0 < compiled.median("saved_for_backward_bytes") <= eager.median("saved_for_backward_bytes")
    )
    blocks = [name for name, _ in compiled.tables["saved_by_block"][1:] if name]
    assert blocks == ["blocks.0"]
    # Attention's result is needed for its own gradient and for that of the next product.
    stream = SPEC.model.residual_stream_bytes(batch=4, sequence=64)
    kept = {(row[0], row[1]): row[-1] for row in compiled.tables["savers"][1:]}
    assert kept["blocks.*.attention", "_scaled_dot_product_flash_attention_for_cpu"] >= stream
    table, largest = kept_tables([eager, compiled])
    assert [row[0] for row in table.rows] == ["compile=off", "compile=on"]
    assert len(largest.rows) == 10
    assert not any(table.caption.endswith("at the peak") for table in memory_tables(compiled))


@pytest.mark.parametrize("vocabulary", [256, 257])
def test_our_loss_is_predicted_to_the_byte(vocabulary):
    """With an odd vocabulary it pads the weight while it runs."""
    model = dataclasses.replace(SPEC.model, loss="fused", vocab_size=vocabulary)
    spec = dataclasses.replace(SPEC, model=model, precision="bf16")
    assert measure(spec).median("peak_bytes") == predicted(spec).median("peak_bytes")


def on_the_gpu(spec, folder):
    """Measures the row in its own process, because workspaces of earlier tests would raise the
    baseline.
    """
    records = [run_isolated(job.run, spec) for job in jobs(spec, folder=folder)]
    (row,) = paired(records)
    return row


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("checkpointing", ["none", "blocks", "nested", "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_categories_add_up_and_the_prediction_is_close(tmp_path, precision, checkpointing):
    model = ModelSpec.preset("small", context_length=256)
    spec = MemorySpec(
        model=model,
        precision=precision,
        checkpointing=checkpointing,
        device="cuda",
        checkpoint_blocks=2,
    )
    row = on_the_gpu(spec, tmp_path)
    peak = row.record.median("peak_bytes")
    assert abs(row.record.median("unexplained_bytes")) < 0.01 * peak
    assert abs(row.error("peak_bytes")) < 0.02
    assert list((tmp_path / "snapshots").glob("*.pickle"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_our_kernels_are_predicted(tmp_path):
    model = ModelSpec.preset(
        "small", context_length=256, norm="triton", attention="triton", loss="fused"
    )
    row = on_the_gpu(
        MemorySpec(model=model, precision="bf16", optimizer="fused", device="cuda"), tmp_path
    )
    assert abs(row.error("peak_bytes")) < 0.03


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_kept_bytes_of_a_compiled_step_are_known(tmp_path):
    model = ModelSpec.preset("small", context_length=256, num_layers=3)
    row = on_the_gpu(
        MemorySpec(model=model, precision="bf16", device="cuda", compile="on"), tmp_path
    )
    record = row.record
    assert abs(record.median("unexplained_bytes")) < 0.01 * record.median("peak_bytes")
    known = sum(row[-1] for row in record.tables["savers"][1:] if row[1] != "outside of operators")
    assert known > 0.95 * record.median("saved_for_backward_bytes")
    assert {f"blocks.{n}" for n in range(3)} <= {
        name for name, _ in record.tables["saved_by_block"][1:]
    }
