"""The record of a timed training step."""

import dataclasses
import shutil
import types

import pytest
import torch

from stepgauge.bench.build import build, check, least_bytes
from stepgauge.bench.step import run
from stepgauge.bench.sweep import _should_repeat
from stepgauge.measure import timing
from stepgauge.measure.cpu_contention import Reading
from stepgauge.measure.timing import time_phases
from stepgauge.report.views import remark
from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.hardware import MATMUL_TYPE
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import FLOAT8, PHASES, PRECISIONS, StepSpec
from stepgauge.train import precision as train_precision


def nano(**fields):
    model = ModelSpec.preset("nano", vocab_size=300, context_length=32)
    return StepSpec(
        **{
            "model": model,
            "size": "nano",
            "batch": 2,
            "warmup": 1,
            "steps": 3,
            "seconds": 0.0,
            **fields,
        }
    )


@pytest.mark.parametrize("phases", PHASES)
def test_the_times_of_phases_add_up_to_the_step(phases):
    record = run(nano(phases=phases))
    timed_phases = {
        "forward": ["forward"],
        "backward": ["forward", "backward"],
        "step": ["forward", "backward", "optimizer"],
    }
    names = [f"{phase}_ms" for phase in timed_phases[phases]]
    assert [name for name in record.metrics if name.endswith("_ms")] == [*names, "step_ms"]
    assert record.metrics["step_ms"].n == 3
    total = sum(record.metrics[name].mean for name in names)
    assert record.metrics["step_ms"].mean == pytest.approx(total)


@pytest.mark.parametrize(("taken", "disturbed"), [(1.0, True), (0.0, False)])
def test_a_row_says_how_many_of_its_cores_other_work_took(monkeypatch, taken, disturbed):
    """Steps that were slowed evenly have no spread."""
    threads = torch.get_num_threads()
    ends = [Reading(0.0, 0.0, 0.0, threads), Reading(10.0, 10.0 * (1.0 + taken), 10.0, threads)]
    monkeypatch.setattr("stepgauge.measure.cpu_contention.reading", lambda: ends.pop(0))
    even = {"forward": [1.0] * 6, "step": [1.0] * 6}
    monkeypatch.setattr("stepgauge.bench.step.time_phases", lambda *_, **__: even)
    record = run(nano(phases="forward"))
    assert record.median("missed_cores") == pytest.approx(taken, abs=0.1)
    assert is_disturbed(record) == _should_repeat(record) == disturbed
    assert ("other work took 1.0 CPU cores" in remark(record)) == disturbed


def test_rates_are_computed_from_the_step_time():
    spec = nano()
    record = run(dataclasses.replace(spec, steps=4))
    seconds = record.median("step_ms") / 1e3
    assert record.median("tokens_per_s") == pytest.approx(64 / seconds)
    flops = spec.network.step_flops(batch=spec.batch, sequence=spec.network.context_length)
    assert record.median("tflop_per_s") == pytest.approx(flops / seconds / 1e12)
    assert "mfu" not in record.metrics  # the peak of a CPU is unknown
    assert record.median("resident_peak_bytes") > 0


@pytest.mark.parametrize("precision", [p for p in PRECISIONS if p != "tf32"])
def test_every_precision_runs_on_a_cpu(precision):
    optimizer = "fused" if precision == "bf16-master" else "adamw"
    spec = nano(precision=precision, optimizer=optimizer, steps=1, warmup=0)
    assert run(spec).metrics["step_ms"].n == 1


def test_a_batch_of_text_runs():
    assert run(nano(data="text", steps=1)).status == "ok"


def test_check_rejects_impossible_specs():
    with pytest.raises(ValueError, match="tf32 is a mode of CUDA matrix units; cpu has none"):
        check(nano(precision="tf32"))
    model = ModelSpec.preset("nano", vocab_size=100)
    with pytest.raises(ValueError, match="vocab_size is 100; text as bytes needs at least 256"):
        check(nano(data="text", model=model))


def test_a_model_larger_than_host_memory_raises_memory_error():
    giant = dataclasses.replace(nano(), model=ModelSpec.preset("10b", num_layers=5000))
    assert least_bytes(giant) == 16 * giant.model.num_parameters
    with pytest.raises(MemoryError, match=r"needs at least [\d.]+ GiB of memory"):
        run(giant)


def test_timing_continues_for_the_given_seconds(monkeypatch):
    """On a simulated clock, on which each step takes 10 ms."""
    calls = []
    clock = types.SimpleNamespace(perf_counter=lambda: 0.01 * len(calls))
    monkeypatch.setattr(timing, "time", clock)
    phases = {"a": lambda: calls.append(1)}
    times = time_phases(phases, torch.device("cpu"), warmup=2, steps=1, seconds=0.045)
    assert times["a"] == times["step"] == pytest.approx([10.0] * 5)
    assert len(calls) == 2 + 5
    times = time_phases(phases, torch.device("cpu"), warmup=0, steps=4)
    assert len(times["step"]) == 4


needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="torch.compile needs a C++ compiler",
)


@needs_compiler
@pytest.mark.parametrize("mode", ["on", "blocks"])
def test_the_compile_time_is_a_separate_metric(mode):
    shallow = dataclasses.replace(nano().model, num_layers=1)
    torch.compiler.reset()  # another test in this process may have compiled the same block
    record = run(nano(model=shallow, compile=mode, steps=5, warmup=1))
    # Its size is not checked: other work slows steps down, and caches make compilation faster.
    assert record.median("compile_s") > 0
    assert record.metrics["step_ms"].n == 5
    assert "compile_s" not in run(nano(model=shallow, steps=1, warmup=1)).metrics


def test_mfu_uses_the_peak_of_the_precision(monkeypatch):
    from stepgauge.bench import rates
    from stepgauge.spec.hardware import ACCELERATORS

    monkeypatch.setattr(rates, "device_name", lambda device: "NVIDIA H200")
    for precision, peak in (("fp32", 67e12), ("bf16", 989.4e12), ("bf16-pure", 989.4e12)):
        record = run(nano(precision=precision, steps=1))
        assert record.median("mfu") == pytest.approx(record.median("tflop_per_s") * 1e12 / peak)
    assert {*PRECISIONS, FLOAT8} == set(MATMUL_TYPE) == set(train_precision.PRECISIONS)
    assert all(peaks.of(p) for peaks in ACCELERATORS.values() for p in PRECISIONS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compile", ["off", "blocks"])
def test_experts_do_not_make_the_host_wait_for_a_gpu(compile):
    model = ModelSpec.preset("nano", num_experts=4, experts_per_token=2)
    spec = StepSpec(model=model, device="cuda", precision="bf16", compile=compile)
    step, batch = build(spec, torch.device("cuda"))
    phases = step.phases(batch)
    for phase in phases.values():
        phase()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for phase in phases.values():
            phase()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_runs_on_a_gpu(precision):
    optimizer = "fused" if precision == "bf16-master" else "adamw"
    record = run(nano(precision=precision, optimizer=optimizer, device="cuda"))
    assert record.median("peak_bytes") > 16 * 300 * 64
    assert record.median("step_ms") > 0
