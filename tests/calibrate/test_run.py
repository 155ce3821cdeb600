"""Calibration records, and the hardware file that they become."""

import dataclasses
import itertools
import json

import pytest
import torch

from stepgauge.bench.sweep import MOST_TRIES, Retries, sweep
from stepgauge.calibrate import contention, machine
from stepgauge.calibrate.grids import CPU, GPU
from stepgauge.calibrate.machine import hardware_file, jobs, missing_shapes, require_same_machine
from stepgauge.calibrate.operations import operations
from stepgauge.calibrate.run import job, names, run, table_of
from stepgauge.cli import predictions
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.step import modelled
from stepgauge.measure.cpu_contention import Reading
from stepgauge.report.views import remark
from stepgauge.spec.calibration import CalibrationSpec, ContentionSpec
from stepgauge.spec.comm import COPIED_OPS
from stepgauge.spec.disturbance import TRIES, is_disturbed
from stepgauge.spec.fallbacks import libraries_of
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.hardware_files import default_path, file_of
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Sample
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore

HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch):
    """Grids of a few shapes: ranks run them in processes of their own, which have all."""
    small = dataclasses.replace(
        CPU,
        coarse_tokens=(64,),
        coarse_widths=(64, 256),
        parameters=(2**14, 2**16),
        bytes=(2**14, 2**16),
    )
    monkeypatch.setattr("stepgauge.calibrate.run.grid_of", lambda _: small)
    return small


def spec(operation, **fields):
    return CalibrationSpec(operation=operation, milliseconds=0.0, seconds=1e4, **fields)


def test_every_shape_is_timed_and_can_be_looked_up_in_the_file(tmp_path, few_shapes):
    asked = ["traffic", "layernorm backward fp32", "optimizer adamw fp32"]
    records = [run(spec(name)) for name in asked]
    for name, record in zip(asked, records, strict=True):
        assert [row[:-1] for row in table_of(record).rows] == operations(few_shapes)[name].grid
        assert all(row[-1] > 0 for row in table_of(record).rows)
        assert record.median("shapes") == len(table_of(record).rows)
    path = tmp_path / "box.json"
    hardware_file(records, HardwareFile(name="box", other={"later": 1})).write(path)
    read = HardwareFile.read(path)
    assert read.other == {"later": 1} and read.device == records[0].environment["device"]
    assert read.threads == torch.get_num_threads()
    (*sizes, us) = table_of(records[1]).rows[-1]  # the largest, which is never taken for the host's
    assert CalibratedMachine(read).time("layernorm backward fp32", *sizes).us == us


def test_a_new_record_replaces_an_older_one_of_the_same_operation():
    record = run(spec("traffic"))
    head, *rows = record.tables["times"]
    slower = [[row[0], 2 * row[1], *row[2:]] for row in rows]
    later = dataclasses.replace(record, tables={"times": [head, *slower]})
    once = hardware_file([record], HardwareFile(name="box"))
    twice = hardware_file([later], once)
    assert twice.operations["traffic"].rows[0][-1] == 2 * once.operations["traffic"].rows[0][-1]


def test_ranks_measure_operations_links_and_contention(tmp_path):
    """Links, contention and an operation by the same two processes."""
    links = [job for job in jobs(HERE, [2], ["links all_reduce"]) if job.spec.size_bytes <= 2**18]
    short = [dataclasses.replace(job, spec=dataclasses.replace(job.spec, seconds=0.01))
             for job in links]  # fmt: skip
    beside = ContentionSpec(kernels="traffic", collective="all_reduce", milliseconds=5.0)
    asked = [job(spec("optimizer adamw fp32", ranks=2)), *short, contention.job(beside)]
    records = [outcome.record for outcome in sweep(asked, RunStore(tmp_path))]
    assert {record.status for record in records} == {"ok"}, [record.note for record in records]
    found = hardware_file(records, HardwareFile(name="box", threads=7))
    assert not found.operations and found.threads == 7  # of a single process nothing was timed
    assert found.on_ranks(2).operations["optimizer adamw fp32"].rows
    assert found.link(op="all_reduce", backend="gloo", ranks=2).time_ms(2**14) > 0
    (row,) = found.contention
    assert (row.kernels, row.collective, row.ranks) == ("traffic", "all_reduce", 2)
    assert row.kernel_slowdown >= 1 and row.collective_slowdown >= 1
    alone, together = (records[-1].median(f"kernel{end}_us") for end in ("", "_beside"))
    assert alone > 0 and together > 0


def test_copies_are_calibrated_between_gpus_that_reach_each_other(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(machine, "run_isolated", lambda function, ranks: [4])
    links, beside = jobs(gpu, [2, 4], ["copies"]), jobs(gpu, [2, 4], ["copied"])
    assert {(job.spec.op, job.spec.algorithm, job.spec.ranks) for job in links} == {
        (op, "push", 4) for op in COPIED_OPS
    }
    assert {(job.spec.kernels, job.spec.collective, job.spec.ranks) for job in beside} == {
        (kernels, f"copied {op}", 4) for kernels in ("matmul", "attention") for op in COPIED_OPS
    }
    of_kind = [job.spec for word in ("links", "contention") for job in jobs(gpu, [2, 4], [word])]
    assert {job.spec for job in (*links, *beside)} < set(of_kind)
    monkeypatch.setattr(machine, "run_isolated", lambda function, ranks: [])
    assert not any("copied" in str(job.spec) for job in jobs(gpu, [4], ["contention"]))
    with pytest.raises(ValueError, match="which needs several ranks: add --ranks 2"):
        jobs(gpu, [], ["links copies"])


def test_contention_with_copies_is_measured_and_kept_in_the_file(tmp_path):
    beside = ContentionSpec(kernels="traffic", collective="copied all_gather", milliseconds=2.0,
                            size_bytes=2**16)  # fmt: skip
    (outcome,) = sweep([contention.job(beside)], RunStore(tmp_path))
    assert outcome.record.status == "ok", outcome.record.note
    path = tmp_path / "box.json"
    hardware_file([outcome.record], HardwareFile(name="box", threads=7)).write(path)
    read = HardwareFile.read(path)
    assert read.contention_of("traffic", "copied all_gather", 2).kernel_slowdown >= 1
    assert read.contention_of("traffic", "all_gather", 2) is None


def test_unknown_operations_are_refused():
    with pytest.raises(ValueError, match="operation is 'walk'; choose one of"):
        job(spec("walk"))
    with pytest.raises(ValueError, match="names begin with matmul, traffic, ") as refused:
        jobs(HERE, [2], ["walk"])
    assert len(str(refused.value)) < 250
    with pytest.raises(ValueError, match="'matmul \\?'; there are matmul nt fp32, "):
        jobs(HERE, [2], ["matmul ?"])
    assert "matmul tn bf16" in names(HERE) and "host eager bf16" not in names(HERE)
    ranks = [job for job in jobs(HERE, [2]) if job.spec.ranks == 2]
    assert {job.spec.kind for job in ranks} == {"calibration", "comm", "contention"}


@pytest.mark.parametrize("grid", [CPU, GPU], ids=("cpu", "gpu"))
def test_shapes_stay_within_the_grids_limits(grid):
    for dtype in grid.widths:
        shapes = grid.products(dtype)
        assert all(max(n, k) <= grid.max_aspect_ratio * min(n, k) for _, n, k in shapes)
        assert (
            len(shapes) > 20
            and max(m * n * k for m, n, k in shapes) <= grid.max_multiply_adds[dtype]
        )
    for name in grid.attentions:
        shapes = grid.attention_shapes(name, "bf16")
        assert max(h * t * t for h, t, _ in shapes) <= grid.max_pairs


def test_the_file_of_a_device_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert file_of("Box 9000", 2) is None
    path = default_path("Box 9000 (R)")
    assert path.name == "box-9000-r.json"
    measured = hardware_file([run(spec("traffic"))], HardwareFile(name="box"))
    dataclasses.replace(measured, device="Box 9000", threads=2).write(path)
    path.with_name("a.json").write_text("no hardware file")
    assert file_of("Box 9000", 2) == path
    assert file_of("Box 9000", 4) is None and file_of("Box", 2) is None
    monkeypatch.setattr(predictions, "_name_and_threads", lambda device: ("Box 9000", 4))
    assert "file box is for 2 threads, but this process has 4" in predictions.why_no_hardware("cpu")


def test_the_file_of_another_machine_is_refused():
    file = HardwareFile(name="box", device="AMD EPYC", threads=2)
    require_same_machine(file, "AMD EPYC", 2)
    require_same_machine(HardwareFile(name="new"), "AMD EPYC", 2)
    with pytest.raises(ValueError, match="is of AMD EPYC, and this is NVIDIA H100"):
        require_same_machine(file, "NVIDIA H100", 0)
    with pytest.raises(ValueError, match="is for 2 threads, and this process has 1"):
        require_same_machine(file, "AMD EPYC", 1)


@pytest.fixture
def cores(monkeypatch):
    """cores(1.0, 0.0): other work takes one core during the first measurement, and none during the
    second, on a machine with as many cores as threads.
    """
    threads = torch.get_num_threads()

    def give(*others):
        ends = [
            reading
            for taken in others
            for reading in (
                Reading(0.0, 0.0, 0.0, threads),
                Reading(10.0, 10.0 * (1.0 + taken), 10.0, threads),
            )
        ]
        monkeypatch.setattr("stepgauge.measure.cpu_contention.reading", lambda: ends.pop(0))
        return ends

    return give


def test_a_disturbed_measurement_is_repeated(cores):
    left = cores(1.0, 0.0, 1.0)
    record = Retries().run(lambda: run(spec("traffic")))
    assert len(left) == 2 and not is_disturbed(record)  # the second was quiet
    assert record.environment[TRIES] == 2
    assert not table_of(record).disturbed


def test_the_row_the_file_and_each_prediction_say_that_a_measurement_was_disturbed(cores, tmp_path):
    left = cores(*[1.0] * MOST_TRIES)
    record = Retries().run(lambda: run(spec("traffic")))
    assert not left and remark(record) == (
        f"disturbed: other work took 1.0 CPU cores that it needed, also in the last of {MOST_TRIES} "
        f"measurements"
    )
    path = tmp_path / "box.json"
    hardware_file([record], HardwareFile(name="box")).write(path)
    words = "the hardware file box was calibrated beside other work (traffic): calibrate it"
    assert json.loads(path.read_text())["disturbed"].startswith(words)
    read = HardwareFile.read(path)
    assert read.disturbance.startswith(words) and not read.other
    asked = StepSpec(model=ModelSpec.preset("nano"), size="nano", device="cpu")
    assert modelled(asked, CalibratedMachine(read), {}, [], None).note == read.disturbance
    cores(0.0)
    quiet = hardware_file([run(spec("traffic"))], read)
    assert not quiet.disturbance


def test_shapes_without_a_time_are_counted_with_the_reason_and_kept_in_the_file(
    monkeypatch, tmp_path
):
    assert missing_shapes([run(spec("traffic"))]) == ""
    clock = itertools.count()  # the second of two shapes is late
    monkeypatch.setattr("stepgauge.calibrate.run.time.perf_counter", lambda: 0.7 * next(clock))
    late = run(dataclasses.replace(spec("optimizer adamw fp32"), seconds=1.0))
    assert missing_shapes([late]) == (
        "1 of 2 shapes were left out: 1 because the time limit of their operation was over"
    )
    few = dataclasses.replace(
        late, metrics={**late.metrics, "shapes_left_out": Sample.exact(54.0, "")}
    )
    assert missing_shapes([late, few]) == (
        "55 of 57 shapes were left out: 2 because the time limit of their operation was over and 53 "
        "because they did not fit in memory. Few were timed of optimizer adamw fp32 (1 of 55): "
        "calibrate with --fresh on a quiet machine"
    )
    hardware_file([few], HardwareFile(name="box")).write(tmp_path / "box.json")
    table = HardwareFile.read(tmp_path / "box.json").operations["optimizer adamw fp32"]
    assert table.left_out == 54 and table.has_few


def test_a_table_says_which_other_package_ran_its_pass(tmp_path):
    ran = {"attention's forward": "FlashAttention-4", "attention's backward": "cuDNN"}
    timed = run(spec("traffic"))
    backward = dataclasses.replace(
        timed,
        spec={**timed.spec, "operation": "attention triton backward bf16"},
        environment={**timed.environment, "native": ran},
    )
    hardware_file([timed, backward], HardwareFile(name="box")).write(tmp_path / "box.json")
    tables = HardwareFile.read(tmp_path / "box.json").operations
    assert {name: table.libraries for name, table in tables.items()} == {
        "traffic": "", "attention triton backward bf16": "cuDNN"
    }  # fmt: skip
    fallback = dataclasses.replace(
        backward, environment={"native": {"attention triton": "plain PyTorch: no Triton"}}
    )
    assert libraries_of(fallback) == ""


@pytest.mark.parametrize("name", sorted({*GPU.attentions} - {"sdpa-cudnn"}))  # it needs a GPU
def test_attention_is_timed_with_the_mask_in_its_name(name):
    """flash_attention has no mask by default, so its table once had twice the work of a causal one."""
    heads, length, width = 2, 64, 16
    operation = operations(GPU)[f"attention {name} forward bf16"]
    torch.manual_seed(0)
    o = operation.make(heads, length, width, HERE)()
    torch.manual_seed(0)
    drawn = (torch.randn(1, length, heads, width, dtype=torch.bfloat16) for _ in range(3))
    q, k, v = (x.transpose(1, 2) for x in drawn)
    causal = not name.endswith("-full")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.allclose(o, expected, atol=2e-2)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(stepgauge, tmp_path):
    (tmp_path / "file").touch()
    status, _, err = stepgauge(
        "calibrate", tmp_path / "file" / "mine.json", "--only", "traffic", "--device", "cpu",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert status == 1 and err == f"stepgauge: cannot use {tmp_path / 'file'}: File exists\n"
    assert not (tmp_path / "run").exists()


def test_kernels_that_a_cpu_does_not_distinguish_are_refused():
    beside = ContentionSpec(kernels="update", ranks=2, device="cpu")
    with pytest.raises(ValueError, match="kernels is 'update'; on a cpu it is one of matmul"):
        contention.job(beside)
