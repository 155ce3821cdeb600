"""Predictions with operations and host times that were measured right before (validate --now)."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.cpu_machine import made_up

from stepgauge.bench.sweep import Job
from stepgauge.calibrate import host, run, step_shapes
from stepgauge.calibrate.step_shapes import host_job, median_probe, shape_jobs
from stepgauge.cli import validate as command
from stepgauge.cost.layout import predict_layout
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.spec.calibration import EXACT, CalibrationSpec, OperationTable
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore
from stepgauge.validate.predicted import predicted, shapes_of
from stepgauge.validate.rows import ValidationRow

FILE = HardwareFile.read(Path(__file__).parents[2] / "hardware" / "h200-sxm.json")
MODEL = ModelSpec.preset("nano", context_length=64)
STEP = StepSpec(model=MODEL, size="nano", batch=2, device="cpu", warmup=0, steps=1, seconds=0.0)
LARGE = ModelSpec.preset("large", context_length=640)


def with_table(name, *rows, file=FILE):
    axes = tuple("abc"[: len(rows[0]) - 1])
    return dataclasses.replace(
        file, operations={**file.operations, name: OperationTable(axes, rows)}
    )


def test_the_shapes_of_a_step_are_timed_and_then_looked_up():
    file = made_up()
    (job,) = [
        job
        for job in shape_jobs(shapes_of([STEP], file), torch.device("cpu"))
        if job.spec.operation == "matmul nt fp32"
    ]
    assert (128, MODEL.vocab_size, MODEL.d_model) in job.spec.shapes
    record = run.run(dataclasses.replace(job.spec, milliseconds=0.0, seconds=1e4))
    after = run.with_operations(file, [record])
    table = after.operations[f"matmul nt fp32 {EXACT}"]
    assert [row[:-1] for row in table.rows] == job.spec.shapes
    assert after.operations["matmul nt fp32"] == file.operations["matmul nt fp32"]
    terms = predicted(STEP, after).tables["terms"]
    operation, source = terms[0].index("operation"), terms[0].index("source")
    assert {row[source] for row in terms if row[operation] == "matmul nt fp32"} == {"calibrated"}


def test_shapes_timed_on_several_gpus_are_used_for_as_many_ranks(monkeypatch):
    monkeypatch.setattr(run, "environment", lambda device: {"device": "a GPU", "cpu": "a CPU"})
    spec = CalibrationSpec(operation="matmul nt bf16", sizes="7x7x7", ranks=2, device="cuda")
    timed = [run.Timed(("m", "n", "k"), [(7, 7, 7, us)], [{}], 0) for us in (3.0, 5.0)]
    record = run.ON_RANKS.record(spec, timed)
    after = run.with_operations(FILE, [record])
    assert (
        CalibratedMachine(after.on_ranks(2)).time("matmul nt bf16", 7, 7, 7).us > 3.0
    )  # the slowest's
    assert f"matmul nt bf16 {EXACT}" not in after.operations
    assert after.on_ranks(2).operations.keys() >= FILE.operations.keys()


@pytest.mark.parametrize(
    ("spec", "operation"),
    [
        (dataclasses.replace(STEP, device="cuda"), "host eager fp32"),
        (dataclasses.replace(STEP, device="cuda", compile="on"), "host compiled bf16"),
        (dataclasses.replace(STEP, device="cuda", compile="blocks", checkpointing="selective"),
         "host blocks bf16 keeping selective"),
        (dataclasses.replace(STEP, device="cuda", compile="reduce-overhead"), None),
        (STEP, None),
        (LayoutSpec(model=LARGE, layout="dp2 zero3", batch=4, compile="blocks", precision="bf16",
                    device="cuda"), None),
        (DataParallelSpec(model=MODEL, wrapper="bucketed", ranks=2, precision="bf16", device="cuda"),
         "host eager bf16 dp2 bucketed"),
        (DataParallelSpec(model=MODEL, wrapper="zero3", ranks=2, precision="bf16", device="cuda"),
         "host eager bf16 dp2 zero3"),
        (DataParallelSpec(model=MODEL, wrapper="torch-ddp", ranks=2, device="cuda"),
         "host eager fp32 dp2 torch-ddp"),
        (LayoutSpec(model=LARGE, layout="tp2 overlap", batch=4, precision="bf16", device="cuda"),
         "host eager bf16 tp2 overlap"),
        (LayoutSpec(model=LARGE, layout="pp2 1f1b m2", batch=4, precision="bf16", device="cuda"),
         "host eager bf16"),
        (StepSpec(model=MODEL, checkpointing="selective", device="cuda"),
         "host eager fp32 keeping selective"),
    ],
)  # fmt: skip
def test_the_host_is_timed_with_the_launches_of_the_step(spec, operation):
    job = host_job(spec, 3)
    assert (job and job.spec.operation) == operation
    if job:
        assert job.spec.ranks == getattr(spec, "ranks", 1) and job.spec.turn == 3


def test_the_host_of_a_stage_of_several_ranks_is_timed_on_these_ranks():
    """A pipeline's launches are those of a stage, and a layout runs on exactly its ranks."""
    spec = LayoutSpec(
        model=LARGE, layout="pp2 1f1b m2 tp2", batch=4, precision="bf16", device="cuda"
    )
    probe = host_job(spec, 1).spec
    assert (probe.operation, probe.ranks, spec.ranks) == ("host eager bf16 tp2", 2, 4)


def test_host_times_of_the_layout_are_used_if_the_file_has_them():
    spec = LayoutSpec(model=LARGE, layout="tp2", batch=4, precision="bf16", device="cuda")
    slow = [(layers, phase, 9e3 * layers) for layers in host.LAYERS for phase in range(3)]
    bound = with_table("host eager bf16 tp2", *slow)
    ms = predict_layout(spec, CalibratedMachine(bound)).median("step_ms")
    assert ms == pytest.approx(3 * 9 * LARGE.num_layers, rel=0.05)
    zero3 = DataParallelSpec(
        model=LARGE, wrapper="zero3", ranks=2, batch=1, precision="bf16", device="cuda"
    )
    own = predicted(zero3, with_table("host eager bf16 dp2 zero3", *slow))
    assert own.median("step_ms") == pytest.approx(3 * 9 * LARGE.num_layers, rel=0.05)


def test_host_times_of_compiled_blocks_are_used_if_the_file_has_them():
    spec = StepSpec(model=LARGE, batch=1, precision="bf16", compile="blocks", device="cuda")
    slow = [(layers, phase, 9e3 * layers) for layers in host.LAYERS for phase in range(3)]
    found = predicted(spec, with_table("host blocks bf16", *slow)).median("step_ms")
    assert found == pytest.approx(3 * 9 * LARGE.num_layers, rel=0.05)
    assert predicted(spec, FILE).median("step_ms") < found / 2  # as one compiled network


def quick_probe(spec):
    """Returns a record of the host's times without timing it."""
    rows = [[layers, phase, 9.0] for layers in host.LAYERS for phase in range(3)]
    times = [[*host.AXES, "us"], *rows]
    return Record.of(spec, metrics={}, environment={}, tables={"times": times})


def test_each_row_is_predicted_after_its_host_is_timed_and_before_it_runs(tmp_path, monkeypatch):
    def timed(spec, turn):
        return Job(
            quick_probe, CalibrationSpec(operation="host eager fp32", turn=turn, device="cpu")
        )

    monkeypatch.setattr(step_shapes, "host_job", timed)
    path, out = tmp_path / "cpu.json", tmp_path / "run"
    dataclasses.replace(made_up(), threads=1).write(path)
    rows = [ValidationRow(dataclasses.replace(STEP, batch=batch), "nothing") for batch in (1, 2)]
    command.compare(rows, path, out=out, fresh=False, format="json", host=True)
    order = [(r.kind, r.provenance) for r in RunStore(out).read().records]
    each = [("calibration", "measured"), ("step", "modelled"), ("step", "measured")]
    assert order == [*each, *each]
    assert all(
        command.HOST_NOTE in r.note and "nothing" in r.note
        for r in RunStore(out).read().records
        if r.provenance == "modelled"
    )


def test_the_host_time_is_the_median_over_probes_of_the_same_launches():
    def probe(us, turn=0, **changes):
        spec = CalibrationSpec(operation="host eager bf16", turn=turn, device="cuda", **changes)
        times = [["layers", "phase", "us", "MHz"], [2, 0, us, 1980.0], [10, 0, 5 * us, turn]]
        return Record.of(spec, metrics={}, environment={}, tables={"times": times})

    probes = [probe(100.0), probe(10.0, ranks=2), probe(900.0, turn=1), probe(110.0, turn=2)]
    assert median_probe(probes).tables["times"][1:] == [[2, 0, 110.0, 1980.0], [10, 0, 550.0, 2]]
    assert median_probe(probes[:2]).tables == probes[1].tables
    wide, narrow = (
        host_job(DataParallelSpec(model=model, wrapper=wrapper, ranks=2, device="cuda"), 1).spec
        for model, wrapper in ((LARGE, "zero3"), (MODEL, "zero3"))
    )
    assert wide == narrow  # which has no buckets
