"""Rows of `bench data-parallel`: their metrics, and bytes as planned."""

import dataclasses

import pytest

from stepgauge.bench import data_parallel as bench
from stepgauge.bench.sweep import Job, sweep
from stepgauge.spec.data_parallel import REDUCE_DTYPES, DataParallelSpec
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.store import RunStore
from stepgauge.train import precision

CHECKED = ("none", "naive", "bucketed", "zero1", "zero3", "torch-ddp", "torch-fsdp")


def spec(wrapper, **changes):
    model = ModelSpec.preset("nano", context_length=16, vocab_size=64)
    fields = {"size": "nano", "steps": 2, "warmup": 1, "bucket_mb": 0.05}
    return DataParallelSpec(**{"model": model, "wrapper": wrapper, **fields, **changes})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    specs = {wrapper: spec(wrapper, trace=wrapper in ("naive", "bucketed")) for wrapper in CHECKED}
    specs["narrow"] = spec("zero1", precision="bf16", reduce_dtype="bf16")
    store = RunStore(tmp_path_factory.mktemp("rows"))
    records = {
        o.job.spec: o.record
        for o in sweep([Job(bench.ON_RANKS, each) for each in specs.values()], store)
    }
    return {name: records[each] for name, each in specs.items()}


def test_the_phases_of_every_row_add_up(rows):
    for wrapper, row in rows.items():
        assert row.status == "ok", (wrapper, row.note)
        parts = sum(row.median(f"{name}_ms") for name in ("forward", "backward", "optimizer"))
        assert 0.5 < parts / row.median("step_ms") < 2
        assert "synchronize_ms" not in row.metrics, "backward ends with complete gradients"
        assert len(row.series["rank_step_ms"]) == 2
        assert row.environment["devices"]
        assert row.median("missed_cores") is not None


def test_communication_is_measured_for_wrappers_that_allow_it(rows):
    assert {w for w in CHECKED if "communication_ms" in rows[w].metrics} == {
        "naive",
        "bucketed",
        "zero1",
    }
    assert {w for w in CHECKED if "exposed_ms" in rows[w].metrics} == {
        "naive",
        "bucketed",
        "zero1",
        "torch-ddp",
    }


def test_the_naive_wrapper_does_not_overlap_communication(rows):
    assert rows["naive"].median("overlap_ratio") == 0
    assert (
        rows["naive"].median("traced_exposed_us")
        == rows["naive"].median("traced_communication_us")
        > 0
    )
    assert rows["naive"].series["communication_start_ms"]
    assert rows["naive"].metrics["profiled_step_ms"].n == 2
    assert rows["bucketed"].median("overlap_ratio") > 0


def test_wrappers_shard_bytes_as_planned(rows):
    parameters = 4 * spec("none").model.num_parameters
    unsharded = rows["none"]
    assert unsharded.median("parameter_bytes") == unsharded.median("gradient_bytes") == parameters
    assert unsharded.median("optimizer_bytes") == pytest.approx(2 * parameters, rel=1e-3)
    assert rows["zero1"].median("optimizer_bytes") == pytest.approx(parameters, rel=0.1)
    assert sum(rows["zero1"].series["rank_optimizer_bytes"]) == pytest.approx(
        2 * parameters, rel=1e-3
    )
    for wrapper in ("zero3", "torch-fsdp"):
        for part in ("parameter", "gradient"):
            assert rows[wrapper].median(f"{part}_bytes") == pytest.approx(parameters / 2, rel=0.05)
    assert all("sent_bytes" not in row.metrics for row in rows.values()), "they are not counted"
    assert rows["narrow"].median("gradient_bytes") == parameters  # fp32 after the reduction


def test_a_cpu_has_only_the_memory_of_the_process(rows):
    """The memory of a process is not the sum of its tensors."""
    for row in rows.values():
        assert row.median("resident_peak_bytes") > 2**27
        assert "peak_bytes" not in row.metrics and "rest_bytes" not in row.metrics


def test_options_that_a_wrapper_ignores_do_not_make_separate_rows():
    rows = {spec("naive", bucket_mb=mb).canonical() for mb in (1, 5)}
    assert len(rows) == 1
    assert len({spec("bucketed", bucket_mb=mb).canonical() for mb in (1, 5)}) == 2
    for wrapper, count in (("zero3", 1), ("zero2", 2)):
        assert (
            len({spec(wrapper, reduce_dtype=name).canonical() for name in ("own", "bf16")}) == count
        )


def test_the_command_line(stepgauge, tmp_path):
    shape = [
        "--size",
        "nano",
        "--context",
        "16",
        "--batch",
        "2",
        "--steps",
        "1",
        "--warmup",
        "1",
        "--device",
        "cpu",
    ]
    status, out, err = stepgauge(
        "bench", "data-parallel", *shape, "--wrapper", "flat", "--out", tmp_path
    )
    assert status == 0, err
    assert "flat" in out
    status, _, err = stepgauge("bench", "data-parallel", *shape, "--wrapper", "fsdp")
    assert status == 2
    assert "--wrapper is 'fsdp'; choose one of none, naive" in err
    status, _, err = stepgauge("bench", "data-parallel", *shape, "--backend", "nccl")
    assert (status, "--backend is 'nccl', which takes only GPU tensors" in err) == (2, True)
    status, _, err = stepgauge(
        "bench", "data-parallel", *shape, "--wrapper", "torch-ddp", "--reduce-dtype", "bf16"
    )
    assert (status, "which torch-ddp supports only on GPUs; --device is 'cpu'" in err) == (2, True)
    idle = (
        "--wrapper",
        "zero3",
        "--precision",
        "bf16",
        "--reduce-dtype",
        "bf16",
        "--out",
        tmp_path,
    )
    status, _, err = stepgauge("bench", "data-parallel", *shape, *idle)
    assert (status, "--reduce-dtype is 'bf16', which has no effect here" in err) == (2, True)


def test_every_wrapper_has_an_implementation():
    from stepgauge.parallel import wrappers

    assert set(wrappers.WRAPPERS) == set(WRAPPERS)
    assert set(precision.REDUCE_DTYPES) == set(REDUCE_DTYPES)
    assert {field.name for field in dataclasses.fields(DataParallelSpec)} >= {
        "wrapper",
        "bucket_mb",
        "ranks",
    }
