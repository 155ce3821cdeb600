"""`stepgauge tune`: a small search on this machine, and the file that it writes."""

import dataclasses
import shlex
from pathlib import Path

from tests.cpu_machine import wired

from stepgauge.cli.tune import _Measurements, _predict
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.tune.search import rate

H100 = Path(__file__).parents[2] / "hardware" / "h100-sxm.json"


def test_the_winners_command_and_file_give_the_same_row(stepgauge, tmp_path):
    out = tmp_path / "run"
    brief = ("--steps", "1", "--warmup", "1", "--seconds", "0")
    status, text, err = stepgauge(
        "tune", "--size", "nano", "--context", "16", "--vocab-size", "64", "--precision", "fp32",
        "--compile", "off", "--checkpointing", "none", "--batch", "1", "2", *brief,
        "--num-layers", "1", "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert status == 0, err
    command = text.splitlines()[-1]
    assert command.startswith("stepgauge bench step ") and "--steps 1 --" in command
    assert "--d-model 64" in command and "--device cpu" in command and "adamw" not in command
    assert "2 candidates could be predicted" in err and "tokens/s" in err
    status, text, err = stepgauge(
        "bench", "step", "--config", out / "tuned.toml", "--out", out, "--format", "json"
    )
    assert status == 0, err
    assert "1 of 1 rows were already in" in err
    status, _, err = stepgauge(*shlex.split(command)[1:], "--out", out)
    assert status == 0 and "1 of 1 rows were already in" in err


def test_the_baseline_and_the_winner_are_measured_again_in_turns(tmp_path, monkeypatch):
    asked = {}

    def run_jobs(jobs, out, **settings):
        asked.update(settings)
        return [dataclasses.replace(job.pending, note="again") for job in jobs]

    monkeypatch.setattr("stepgauge.cli.tune.run_jobs", run_jobs)
    measured = _Measurements(tmp_path, None, fresh=True)
    specs = [StepSpec(model=ModelSpec.preset("nano"), size="nano", batch=batch) for batch in (1, 2)]
    found = measured.in_turns(specs, "again")
    assert asked == {"fresh": False, "turns": 3}
    assert [record.spec["batch"] for record in found] == [1, 2]
    assert measured(specs, "again") == found, "the new records replace the old ones"


NET = """
import torch
from torch import nn
def net():
    return nn.Linear(32, 8), (torch.randn(4, 32), torch.zeros(4, dtype=torch.long)), nn.CrossEntropyLoss()
"""


def test_a_users_network_is_predicted_and_unpredictable_values_are_measured(stepgauge, tmp_path):
    file, hardware = tmp_path / "mine.py", tmp_path / "cpu.json"
    file.write_text(NET)
    wired(1).write(hardware)  # which has no times of bf16
    status, text, err = stepgauge(
        "tune", "--model", f"{file}:net", "--precision", "fp32", "bf16", "--compile", "off",
        "--steps", "1", "--warmup", "1", "--seconds", "0", "--device", "cpu", "--hardware", hardware,
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert status == 0, err
    assert "predicted" in text and "error" in text
    assert "1 of 2 candidates were predicted" in err
    assert "without a prediction: precision bf16, measured on the fastest" in err


def test_a_candidate_that_does_not_fit_is_ranked_last():
    hardware = HardwareFile.read(H100)
    model = ModelSpec.preset("2.7b")
    fits, too_large = (
        _predict(hardware, StepSpec(model=model, batch=batch, device="cuda", precision="bf16"))
        for batch in (4, 64)
    )
    assert fits.status == "ok" and rate(fits) > 0
    assert too_large.status == "oom" and rate(too_large) == 0


def test_wrong_options_are_refused(stepgauge):
    for arguments, message in (
        (("--size", "vast"), "--size is 'vast'"),
        (("--best", "0", "--device", "cpu"), "--best is 0"),
        (("--device", "cpu", "--ranks", "2", "--phases", "forward"), "phases is no option"),
        (("--device", "cpu", "--precision", "fp32", "--d-model", "7"), "--d-model 7"),
    ):
        status, _, err = stepgauge("tune", *arguments)
        assert status == 2 and message in err, (arguments, err)
