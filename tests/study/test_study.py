"""The study: what a machine runs, and its report."""

import dataclasses
import json
import subprocess
import sys

import pytest

from stepgauge.report.memory import SAME_COUNT, memory_blocks
from stepgauge.report.names import labels
from stepgauge.report.page import Text
from stepgauge.report.run_page import warnings
from stepgauge.report.table import objects
from stepgauge.spec.comm import CommSpec
from stepgauge.spec.disturbance import CRITERION
from stepgauge.spec.experiments import EXPERIMENTS as NAMES
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore
from stepgauge.spec.turns import of_turns
from stepgauge.study import (
    EXPERIMENTS,
    profile,
    published,
    sharded_state,
    step_time,
    warm_up,
)
from stepgauge.study.experiment import StudyMachine, shipped
from stepgauge.study.notes import write_machine, write_rows
from stepgauge.study.pages import page_of
from stepgauge.study.run import plan, select, unconfirmed
from stepgauge.study.sizes import sizes

CPU = StudyMachine(device="cpu", name="Test CPU", bytes=24 * 2**30, has_compiler=True)
H100 = StudyMachine(
    device="cuda", name="NVIDIA H100 80GB HBM3", bytes=80 * 2**30, has_compiler=True
)
LAPTOP = dataclasses.replace(H100, name="Laptop GPU", bytes=8 * 2**30)


@pytest.mark.parametrize("machine", [CPU, H100, LAPTOP], ids=lambda machine: machine.name)
def test_every_job_runs_once_and_on_the_machines_device(machine, tmp_path):
    jobs = plan(machine, tmp_path, EXPERIMENTS)
    assert len({job.pending.identity for job in jobs}) == len(jobs)
    assert {job.spec.device for job in jobs} == {machine.device}


@pytest.mark.parametrize("machine", [CPU, H100], ids=lambda machine: machine.name)
def test_all_experiments_time_a_step_in_the_same_way(machine, tmp_path):
    """All except the warm-up experiment, which compares ways to time a step."""
    others = [each for each in EXPERIMENTS if each is not warm_up.EXPERIMENT]
    jobs = plan(machine, tmp_path, others)
    steps = {job.spec for job in jobs if isinstance(job.spec, StepSpec)}
    works = [dataclasses.replace(spec, warmup=0, steps=1, seconds=0.0) for spec in steps]
    assert len(set(works)) == len(steps) > 5


def test_the_sizes_that_fit_on_a_gpu():
    assert sizes(H100) == ["small", "medium", "large", "xl", "2.7b"]
    assert sizes(LAPTOP) == ["small", "medium"]
    largest = step_time.specs(LAPTOP, None)[-1].size
    assert largest == "large"  # the first size that does not fit is included


def test_a_machine_without_compiler_leaves_compile_out(tmp_path):
    bare = dataclasses.replace(CPU, has_compiler=False)
    assert not any(
        getattr(job.spec, "compile", "off") != "off" for job in plan(bare, tmp_path, EXPERIMENTS)
    )
    assert any(
        getattr(job.spec, "compile", "off") != "off" for job in plan(CPU, tmp_path, EXPERIMENTS)
    )


def test_select_by_name():
    assert select([]) == list(EXPERIMENTS)
    assert [experiment.name for experiment in EXPERIMENTS] == list(NAMES)
    assert [e.name for e in select(["compile", "step-time"])] == ["compile", "step-time"]


def measured(job, milliseconds, machine):
    """Returns a record such as the job would give."""
    if job.spec.kind in ("comm", "broadcast"):
        figures = {
            "time_ms": "ms",
            "busbw_gb_per_s": "GB/s",
            "gb_per_s": "GB/s",
            "host_link_gb_per_s": "GB/s",
        }
        metrics = {name: Sample.exact(milliseconds, unit) for name, unit in figures.items()}
        return dataclasses.replace(job.pending, metrics=metrics, environment=environment(machine))
    if job.spec.kind in KERNELS:
        metrics = {
            f"{name}_ms": Sample.of([milliseconds, 1.1 * milliseconds], "ms")
            for name in ("ours", "eager")
        }
        outcomes = {"outcomes": {"ours": "ok", "eager": "ok", "fa2": "oom: memory ran out"}}
        return dataclasses.replace(
            job.pending, metrics=metrics, environment=environment(machine) | outcomes
        )
    times = {"forward_ms": 1, "backward_ms": 2, "optimizer_ms": 0.5, "step_ms": 3.5}
    metrics = {
        name: Sample.of([milliseconds * f * s for s in (0.99, 1, 1.02)], "ms")
        for name, f in times.items()
    }
    metrics["tokens_per_s"] = Sample.exact(1e6 / milliseconds, "tokens/s")
    metrics["tflop_per_s"] = Sample.exact(100.0, "TFLOP/s")
    if job.spec.kind == "data-parallel":
        parts = ("parameter", "gradient", "optimizer", "rest", "peak", "tail")
        metrics |= {f"{part}_bytes": Sample.exact(2**20, "bytes") for part in parts}
        metrics["buckets"] = Sample.exact(4, "")
    return dataclasses.replace(
        job.pending, metrics=metrics, environment=environment(machine), created="2026-01-01"
    )


def environment(machine):
    return {
        "device": machine.name, "device_bytes": machine.bytes, "cpu": "Test", "cores": 2, "os": "Linux",
        "python": "3.11", "torch": "2.13.0", "stepgauge": "0.1.0", "commit": None,
    }  # fmt: skip


def study_run(folder, machine, failing=()):
    store = RunStore(folder)
    store.prepare()
    write_machine(machine, folder)
    for number, job in enumerate(plan(machine, folder, EXPERIMENTS)):
        record = measured(job, 10.0 + number, machine)
        if number in failing:
            record = dataclasses.replace(
                record, metrics={}, status="oom", note="device memory ran out <at> 2 GiB more"
            )
        store.append(record)
    return store


@pytest.mark.parametrize("machine", [CPU, H100], ids=lambda machine: machine.name)
def test_the_report_has_a_section_for_each_experiment(machine, tmp_path):
    store = study_run(tmp_path, machine, failing=(1,))
    path = page_of(tmp_path, store.read().latest()).write(tmp_path / "report.html")
    text = path.read_text()
    for experiment in EXPERIMENTS:
        assert experiment.title in text
    assert "cannot be drawn" not in text
    assert text.count("<svg") >= 6
    assert published.legend(["S1"]) in text
    assert "OOM: device memory ran out &lt;at&gt; 2 GiB more" in text
    assert machine.name in text
    assert len(text) < 1.5 * 2**20
    assert "What to change first" in text
    assert ("Not this machine: measured on NVIDIA" in text) is (machine is CPU)


def test_only_rows_of_findings_are_measured_in_turns(tmp_path):
    (experiment,) = select(["compile"])
    jobs = plan(CPU, tmp_path, [experiment, *select(["step-time"])])
    eager, compiled = experiment.jobs(CPU, tmp_path)
    records = [measured(job, 5.0 if job == compiled else 10.0, CPU) for job in jobs]
    again = unconfirmed(jobs, records)
    assert {job.spec for job in again} == {eager.spec, compiled.spec}
    pair = [record for record in records if record.key in {job.pending.key for job in again}]
    turned = [of_turns([record] * 3, "2026-01-01") for record in pair]
    assert unconfirmed(jobs, turned) == []
    bf16 = dataclasses.replace(eager, spec=dataclasses.replace(eager.spec, precision="bf16"))
    # A new finding shares a row with one that is confirmed: all of their rows are measured again.
    mixed = [*turned, measured(bf16, 1.0, CPU)]
    assert {job.spec for job in unconfirmed([*jobs, bf16], mixed)} == (
        {eager.spec, compiled.spec, bf16.spec}
    )


def test_a_section_that_cannot_be_drawn_says_why_and_logs_the_traceback(
    stepgauge, tmp_path, monkeypatch
):
    def broken(records):
        raise KeyError("no such column")

    study_run(tmp_path, CPU)
    first, *rest = EXPERIMENTS
    shown = [dataclasses.replace(first, blocks=broken), *rest]
    monkeypatch.setattr("stepgauge.study.pages.EXPERIMENTS", shown)
    status, out, err = stepgauge("report", tmp_path)
    assert status == 1 and out.strip() == str(tmp_path / "report.html")
    why = f"cannot be drawn: KeyError: 'no such column'; traceback in {tmp_path}/failures.log"
    assert err == f"stepgauge: the section of {first.name} {why}\n"
    text = (tmp_path / "report.html").read_text()
    assert "its section cannot be drawn: KeyError" in text and f"{tmp_path}/failures.log" in text
    log = (tmp_path / "failures.log").read_text()
    assert first.name in log and "in broken" in log


def test_a_page_written_from_files_without_torch_is_the_same(tmp_path):
    records = study_run(tmp_path, CPU).read().latest()
    page_from_jobs = page_of(tmp_path, records).html()
    write_rows(EXPERIMENTS, CPU, tmp_path)
    code = (
        "import sys; from stepgauge import cli\n"
        f"sys.exit(cli.run(['report', {str(tmp_path)!r}]) or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "report.html").read_text() == page_from_jobs


def test_experiments_that_did_not_run_are_listed_with_the_reason(tmp_path):
    write_machine(dataclasses.replace(CPU, has_compiler=False), tmp_path)
    text = page_of(tmp_path, []).html()
    assert "Not in this run" in text
    assert "torch.compile needs a C++ compiler" in text


def test_any_run_has_a_page(stepgauge, tmp_path, record):
    store = RunStore(tmp_path / "a")
    store.prepare()
    for spec in ({}, {"compile": "on"}):
        store.append(record("small", step=[10.0 - len(spec), 10.1 - len(spec)], **spec))
    assert stepgauge("report", store.folder)[0] == 0
    text = (store.folder / "report.html").read_text()
    assert "Not confirmed" in text and "compile=on may save 1.000 ms per step" in text
    assert "--precision fp32 --compile off on --turns 3" in text
    assert "The longest step takes 10.05 ms (compile=off)" in text


def test_shipped_records_of_gpus_answer_the_questions():
    for name in ("norm-layers", "attention"):
        (experiment,) = select([name])
        assert experiment.needs(CPU) and experiment.needs(H100) is None
        assert "Our kernel is the fastest in" in experiment.answer(shipped(name))
    for name in ("fused-step", "collectives", "data-parallel", "sharded-state", "broadcast"):
        (experiment,) = select([name])
        assert experiment.answer(shipped(name)), name
    assert "torch-fsdp takes" in select(["ddp-vs-fsdp"])[0].answer(shipped("ddp-vs-fsdp"))
    assert shipped("warm-up") == []


def test_published_rows_are_compared_with_our_most_similar_rows(tmp_path):
    jobs = step_time.EXPERIMENT.jobs(H100, tmp_path)
    ours = [measured(job, 10.0, H100) for job in jobs if job.spec.size == "small"]
    rows = objects(published.comparison("step-time", ours))
    found = {(row["row"], row["source"]): row for row in rows}
    small = found["size=small", "S1"]
    assert (small["batch × context here"], small["here forward ms"]) == ("16 × 128", 10.0)
    assert (small["published forward ms"], small["published backward ms"]) == (18.8, 34.0)
    assert found["size=small", "S2"]["batch × context here"] == "4 × 128"
    unmatched = found["size=2.7b", "S1"]
    assert (unmatched["here forward ms"], unmatched["published forward ms"]) == (None, 257)
    assert unmatched["batch × context here"] == "not run here"


def test_published_figures_without_a_similar_row_are_folded():
    table = published.comparison("step-time", [])
    assert table.folded
    assert table.caption.startswith("Published figures (nothing comparable was measured here).")
    assert not any("here" in column for column in table.columns)
    assert "published forward ms" in table.columns


def test_published_figures_are_records_of_known_experiments_and_sources():
    rows = published._file()["rows"]
    assert {row["experiment"] for row in rows} <= set(NAMES)
    for experiment in {row["experiment"] for row in rows}:
        for record in published.published(experiment):
            assert record.provenance == "published" and published.legend([record.source])


def test_published_message_sizes_are_compared_with_powers_of_two():
    def row(device, ms, size):
        spec = CommSpec(size_bytes=size, device=device)
        metrics = {"time_ms": Sample.of([ms], "ms")}
        return Record(kind="comm", spec=dataclasses.asdict(spec), metrics=metrics)

    ours = [row("cuda", 9.0, 2**20), row("cpu", 7.0, 2**20), row("cpu", 70.0, 10 * 2**20)]
    gloo = [
        row for row in objects(published.comparison("collectives", ours)) if "gloo" in row["row"]
    ]
    # Only rows with tensors on the host match, and only those of a similar size.
    assert [row["here time ms"] for row in gloo] == [7.0, 70.0, None, None]


def test_the_legend_describes_the_sources():
    assert published.legend(["S1", "S1"]) == (
        "S1: write-up of assignment 2, 2024, Stanford course CS336, A100-class GPU "
        "(author, title unknown)"
    )
    assert published.legend(["S1", "S5"]) in profile.published_table().caption


def test_a_section_begins_with_warnings_on_its_figures(record):
    quiet, busy = record("small", step=[10.0, 10.1]), record("medium", step=[10.0, 20.0])
    ours = dataclasses.replace(
        quiet, environment={**quiet.environment, "native": {"norm triton": "plain PyTorch: so"}}
    )
    assert warnings([quiet]) == []
    assert [block.text for block in warnings([ours, ours, busy])] == [
        "Our kernels were not measured: norm triton ran in plain PyTorch: so.",
        f"Disturbed rows, marked † in plots ({CRITERION}): {labels([quiet, busy])[1]}.",
    ]


def test_the_study_runs_here(stepgauge, tmp_path, monkeypatch):
    """Runs the shortest experiment without mocks."""
    monkeypatch.setattr(warm_up, "WARM_UPS", (0, 1))
    status, out, err = stepgauge("study", "--only", "warm-up", "--device", "cpu", "--out", tmp_path)
    assert status == 0, err
    assert out.strip().endswith("report.html")
    warmups = [r.spec["warmup"] for r in RunStore(tmp_path).read().records]
    assert warmups == [0, 1]
    assert json.loads((tmp_path / "machine.json").read_text())["device"] == "cpu"
    text = (tmp_path / "report.html").read_text()
    assert "not measured in this run" in text
    assert "warm-up 1" in text and "Without warm-up, the mean of" in text

    shown = [dataclasses.replace(select(["warm-up"])[0], blocks=lambda records: records[0].none)]
    monkeypatch.setattr("stepgauge.study.pages.EXPERIMENTS", shown)
    status, out, err = stepgauge("study", "--only", "warm-up", "--device", "cpu", "--out", tmp_path)
    assert status == 1 and out.strip().endswith("report.html")
    assert "the section of warm-up cannot be drawn: AttributeError" in err


def sharded(**gib):
    metrics = {f"{name}_bytes": Sample.exact(value * 2**30, "bytes") for name, value in gib.items()}
    return Record(kind="data-parallel", spec={"size": "tiny", "wrapper": "zero1"}, metrics=metrics)


def test_on_a_cpu_the_predicted_peak_has_no_error():
    """The same tracker counts and predicts it."""

    def rows(device):
        measured = Record(
            kind="memory",
            spec=dataclasses.asdict(
                MemorySpec(model=ModelSpec.preset("nano"), size="nano", device=device)
            ),
            metrics={"peak_bytes": Sample.exact(2**30, "bytes")},
        )
        return [measured, dataclasses.replace(measured, provenance="modelled")]

    for device, text in (("cuda", "Largest error of the predicted peak"), ("cpu", SAME_COUNT)):
        table, *blocks = memory_blocks(rows(device), drawn=[], compared=[])
        assert text in next(block.text for block in blocks if isinstance(block, Text))
        assert ("predicted error %" in table.columns) == (device == "cuda")


@pytest.mark.parametrize(
    ("found", "total", "caption"),
    [
        ({"peak": 9.5, "rest": 2.25}, "9.5", "Peak memory of tiny by part."),
        ({"resident_peak": 20}, "7", "Memory kept between steps of tiny by part."),
    ],
)
def test_memory_by_part_ends_at_the_peak_or_at_the_memory_kept(found, total, caption):
    (plot,) = sharded_state._picture([sharded(parameter=1, gradient=2, optimizer=4, **found)])
    assert plot.caption == caption
    assert f">{total}<" in plot.svg and (">rest<" in plot.svg) == ("rest" in found)


def test_if_the_fewest_micro_batches_are_best_they_are_compared_with_the_most():
    def row(micro_batches, rate):
        spec = {"schedule": "1f1b", "ranks": 2, "micro_batches": micro_batches, "overweight": 0}
        metrics = {"samples_per_s": Sample.exact(rate, "samples/s")}
        return Record(kind="pipeline", spec=spec, metrics=metrics)

    answer = select(["pipeline"])[0].answer
    falling, rising = ([row(n, rate) for n, rate in zip((2, 4, 8), rates, strict=True)]
                       for rates in ((9.0, 8.0, 7.0), (7.0, 8.0, 9.0)))  # fmt: skip
    assert "9.000 samples/s with 2 micro-batches, and 7.000 with 8." in answer(falling)
    assert "9.000 samples/s with 8 micro-batches, and 7.000 with 2." in answer(rising)
    of_one = "No throughputs are compared: no schedule has two numbers of micro-batches."
    assert answer(falling[:1]) == of_one
    busy = {**falling[0].metrics, "step_ms": Sample.of([1.0, 9.0], "ms")}
    disturbed = dataclasses.replace(falling[0], metrics=busy)
    assert answer([disturbed]) == "No throughputs are compared: all rows were disturbed."
