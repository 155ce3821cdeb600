"""A user's own network in `train`: its batches, loss, held-out set and optimizer, and resuming."""

import dataclasses

import pytest

from stepgauge.bench.train import build_task, run
from stepgauge.spec.train import TrainSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.train.checkpoint import CheckpointError

MODEL = """
import torch
from torch import nn
def data(number):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
    return x, x.sum(1, keepdim=True)
def module():
    return nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 1))
def regression():
    return {"module": module(), "batches": data, "loss": nn.MSELoss(), "held_out": [data(-1), data(-2)]}
class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, x, y):
        return {"loss": (self.linear(x) - y).square().mean()}
def named():
    return {"module": Named(), "batches": lambda n: dict(zip("xy", data(n))),
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)}
def single(): return module(), data(0), nn.MSELoss()
def tuple_held_out(): return {**regression(), "held_out": data(-1)}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


def spec_of(file, factory, **changes):
    defaults = {"steps": 24, "warmup": 4, "evaluate_every": 12, "checkpoint_every": 12}
    return TrainSpec(model=UserModel.read(f"{file}:{factory}"), **{**defaults, **changes})


class StoppedError(Exception):
    pass


def stopped_at(step):
    def report(point):
        if point.step == step:
            raise StoppedError

    return report


def test_a_users_network_learns_and_a_stopped_run_resumes_bit_for_bit(file, tmp_path):
    spec = spec_of(file, "regression", learning_rate=0.05, accumulation=2)
    whole = run(spec, folder=tmp_path / "whole")
    assert whole.median("last_loss") < 0.5 * whole.median("first_loss")
    assert whole.series["held_out_step"] == [12, 24]
    first, last = whole.series["held_out_loss"]
    assert last < first and last == whole.median("held_out")
    assert whole.metrics["last_loss"].unit == "" and "steps_per_s" in whole.metrics
    assert whole.environment["num_parameters"] == 193
    assert whole.spec["size"] == "regression"
    with pytest.raises(StoppedError):
        run(spec, folder=tmp_path / "cut", report=stopped_at(18))
    assert run(spec, folder=tmp_path / "cut").series == whole.series  # including dropout


def test_training_on_one_batch_is_noted(file, tmp_path):
    notes = []
    for factory in ("single", "regression"):
        run(spec_of(file, factory, steps=1, warmup=0), folder=tmp_path / factory, note=notes.append)
    (note,) = notes
    assert "mine.py:single returns 'batch', so that every step trains on this one batch" in note
    assert "'batches'" in note


def test_an_edited_file_cannot_be_resumed(file, tmp_path):
    run(spec_of(file, "single", steps=10), folder=tmp_path)
    file.write_text(MODEL.replace("0.2", "0.3"))
    with pytest.raises(CheckpointError, match=r"is of another run: source \w+ there, \w+ here"):
        run(spec_of(file, "single", steps=10), folder=tmp_path)


def test_the_files_optimizer_is_recorded_and_its_rate_is_the_peak_of_the_schedule(file, tmp_path):
    spec = spec_of(file, "named", steps=8)
    record = run(spec, folder=tmp_path)
    assert record.environment["optimizer"] == "user SGD"
    assert record.median("last_loss") < record.median("first_loss")
    assert "held_out" not in record.metrics
    rates = []
    task = build_task(spec)
    update = task.step.update
    task.step.update = lambda: (rates.append(task.step.optimizer.param_groups[0]["lr"]), update())
    from stepgauge.train.loop import Trainer

    Trainer(spec, task, tmp_path / "again").run(lambda point: None)
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5] and rates[-1] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("factory", "changes", "message"),
    [
        ("named", {"learning_rate": 0.1}, "learning_rate is 0.1; the user's model brings an optim"),
        ("named", {"optimizer": "sgd"}, "optimizer is 'sgd'; the user's model brings its own"),
        ("single", {"corpus": "text"}, "corpus is 'text'; a user's model brings its own batches"),
        ("single", {"checkpointing": "blocks"}, "a user's model chooses its own"),
        ("tuple_held_out", {}, "returned held_out tuple; it must be a list of batches"),
        ("single", {"data_parallel": "zero1"}, "which has no effect on one rank: give --ranks"),
    ],
)
def test_unsuitable_options_and_parts_are_refused(file, factory, changes, message):
    with pytest.raises(ValueError) as error:
        build_task(dataclasses.replace(spec_of(file, factory), **changes))
    assert message in str(error.value)
