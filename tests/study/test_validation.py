"""The study's predictions use the calibration of the same run, and are not repeated."""

import dataclasses

import torch

from stepgauge.measure.environment import environment
from stepgauge.spec.calibration import CalibrationSpec
from stepgauge.spec.predictions import BEFORE
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.store import RunStore
from stepgauge.study import validation
from stepgauge.study.experiment import StudyMachine

CPU = StudyMachine(device="cpu", name="Test CPU", bytes=24 * 2**30, has_compiler=True)
AXES = {"matmul": "mnk", "rmsnorm": "mn", "attention": "htd", "cross-entropy": "mv",
        "embedding": "mn"}  # fmt: skip


def timed(spec, **metrics):
    """Returns a record such as the calibration would give, with two shapes."""
    axes = AXES.get(spec.operation.split()[0], "b")
    rows = [[*axes, "us", "MHz"], [*(64 for _ in axes), 10.0, 2000.0],
            [*(128 for _ in axes), 70.0, 2000.0]]  # fmt: skip
    return Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics={name: Sample.exact(value, "") for name, value in metrics.items()},
        tables={"times": rows},
        environment=environment(torch.device("cpu")),
    )


def test_a_row_is_predicted_from_the_runs_calibration_and_not_again(tmp_path):
    jobs = validation.EXPERIMENT.jobs(CPU, tmp_path)
    store = RunStore(tmp_path)
    store.prepare()
    for job in jobs:
        if isinstance(job.spec, CalibrationSpec):
            store.append(timed(job.spec))
    predictions = [job for job in jobs if job.provenance == "modelled"]
    measured = [job for job in jobs if job.spec in {each.spec for each in predictions}]
    assert len(measured) == 2 * len(predictions) >= 8
    assert [job.provenance for job in measured[: len(predictions)]] == ["modelled"] * len(
        predictions
    )
    first = predictions[0]
    record = first.run(first.spec)
    assert record.note == BEFORE and record.median("step_ms") > 0
    asked = dataclasses.replace(first.pending, environment=environment(torch.device("cpu")))
    assert record.identity == asked.identity  # a second run finds and keeps the record


def test_the_answer_says_that_the_calibration_was_disturbed(tmp_path):
    jobs = validation.EXPERIMENT.jobs(CPU, tmp_path)
    store = RunStore(tmp_path)
    store.prepare()
    for job in jobs:
        if isinstance(job.spec, CalibrationSpec):
            store.append(timed(job.spec, missed_cores=0.8))
    job = next(job for job in jobs if job.provenance == "modelled")
    prediction = job.run(job.spec)
    assert prediction.note.startswith(f"{BEFORE}; ")
    metrics = {"step_ms": Sample.exact(50.0, "ms")}
    measured = dataclasses.replace(prediction, provenance="measured", metrics=metrics, note="")
    assert "was calibrated beside other work" in validation.EXPERIMENT.answer(
        [prediction, measured]
    )


def test_a_gpu_without_a_hardware_file_cannot_run_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpu = dataclasses.replace(CPU, device="cuda", name="NVIDIA H300")
    assert "stepgauge calibrate makes one" in validation.needs(gpu)
    assert validation.needs(CPU) is None
