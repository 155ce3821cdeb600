"""A run that is killed and resumed has the same loss curve as one that is not interrupted."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from stepgauge.bench.train import build_task, run
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.train import TrainSpec
from stepgauge.train.checkpoint import MANIFEST, CheckpointError, Checkpoints
from stepgauge.train.loop import CURVE_FILE, DivergedError, Trainer, read_curve


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(
        "".join(f"{i} bottles of beer on the wall, take {i % 7} down\n" for i in range(3000))
    )
    return str(path)


@pytest.fixture
def spec(corpus):
    model = ModelSpec.preset("nano", context_length=32)
    return TrainSpec(
        model=model, size="nano", corpus=corpus, steps=24, batch=4, warmup=4, evaluate_every=6, evaluate_windows=8,
        checkpoint_every=6, accumulation=2, learning_rate=3e-3,
    )  # fmt: skip


class KilledError(Exception):
    pass


def killed_at(step):
    def report(point):
        if point.step == step:
            raise KilledError

    return report


def test_the_loss_falls(spec, tmp_path):
    record = run(dataclasses.replace(spec, steps=60, checkpoint_every=1000), folder=tmp_path)
    assert record.series["loss"][0] == pytest.approx(
        5.545, abs=0.1
    )  # ln 256, the loss before training
    assert record.series["loss"][-1] < 3.5
    assert record.median("held_out") < 5.0
    assert record.series["step"] == list(range(1, 61))
    assert len(record.environment["corpus_sha256"]) == 64


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_stopped_run_resumes_bit_for_bit(spec, tmp_path, precision):
    spec = dataclasses.replace(spec, precision=precision, steps=18)
    whole = run(spec, folder=tmp_path / "whole")
    with pytest.raises(KilledError):
        run(spec, folder=tmp_path / "cut", report=killed_at(10))
    seen = []
    resumed = run(spec, folder=tmp_path / "cut", report=lambda point: seen.append(point.step))
    assert resumed.series == whole.series
    assert seen == list(range(7, 19))  # after the checkpoint of step 6
    assert (tmp_path / "cut" / CURVE_FILE).read_text() == (
        tmp_path / "whole" / CURVE_FILE
    ).read_text()


def test_killed_by_signal_at_any_moment(stepgauge, tmp_path, corpus):
    """Kills the command itself several times, at arbitrary moments."""
    options = {"size": "nano", "context": "32", "corpus": corpus, "steps": "40", "batch": "4"}
    options |= {"checkpoint-every": "5", "evaluate-every": "20", "device": "cpu"}
    command = ["train", *(word for name, value in options.items() for word in (f"--{name}", value))]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert stepgauge(*command, "--out", whole)[0] == 0
    for wanted in (5, 20):
        process = subprocess.Popen(
            [sys.executable, "-m", "stepgauge", *command, "--out", str(cut)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 100
        while process.poll() is None and time.monotonic() < deadline:
            points = read_curve(cut / CURVE_FILE)
            if points and points[-1].step >= wanted:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert stepgauge(*command, "--out", cut)[0] == 0
    assert (cut / CURVE_FILE).read_text() == (whole / CURVE_FILE).read_text()


def folders(path):
    return sorted(p.name for p in (path / "checkpoints").iterdir())


def test_only_the_newest_checkpoints_are_kept(spec, tmp_path):
    run(spec, folder=tmp_path)
    assert folders(tmp_path) == ["step-000000018", "step-000000024"]


def cut_largest_file(folder):
    path = max(folder.iterdir(), key=lambda p: p.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(folder):
    path = max(folder.iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        cut_largest_file,
        flip_a_byte,
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text("{"),
        lambda folder: (folder / ".metadata").unlink(),
    ],
    ids=["cut", "bit flip", "no manifest", "bad manifest", "no metadata"],
)
def test_a_damaged_checkpoint_is_skipped(spec, tmp_path, damage):
    whole = run(spec, folder=tmp_path)
    damage(tmp_path / "checkpoints" / "step-000000024")
    with pytest.warns(UserWarning, match="step-000000024 is incomplete and is skipped"):
        assert [step for step, _, _ in Checkpoints(tmp_path / "checkpoints").newest()] == [18]
    with pytest.warns(UserWarning, match="incomplete"):
        assert run(spec, folder=tmp_path).series == whole.series


def test_a_partial_checkpoint_is_never_loaded(spec, tmp_path):
    run(spec, folder=tmp_path)
    newest = tmp_path / "checkpoints" / "step-000000024"
    newest.rename(newest.with_suffix(".partial"))
    assert [step for step, _, _ in Checkpoints(tmp_path / "checkpoints").newest()] == [18]


def test_a_checkpoint_of_another_model_is_refused(spec, tmp_path):
    run(spec, folder=tmp_path)
    other = dataclasses.replace(spec, model=dataclasses.replace(spec.model, d_ff=128))
    with pytest.raises(CheckpointError, match=r"is of another run: d_ff 256 there, 128 here"):
        run(other, folder=tmp_path)
    same = dataclasses.replace(spec, model=dataclasses.replace(spec.model, norm="rmsnorm-eager"))
    run(same, folder=tmp_path)  # another implementation of the same network may resume


def test_a_run_with_a_constant_learning_rate_can_be_extended(spec, tmp_path):
    constant = dataclasses.replace(spec, final_learning_rate=1.0)
    whole = run(constant, folder=tmp_path / "whole")
    run(dataclasses.replace(constant, steps=12), folder=tmp_path / "longer")
    assert run(constant, folder=tmp_path / "longer").series["loss"] == whole.series["loss"]
    with pytest.raises(CheckpointError, match=r"is at step 24, but --steps is 12"):
        run(dataclasses.replace(constant, steps=12), folder=tmp_path / "longer")


def test_a_run_whose_learning_rate_decays_cannot_be_extended(spec, tmp_path):
    run(dataclasses.replace(spec, steps=4), folder=tmp_path)  # all of them are warm-up steps
    run(dataclasses.replace(spec, steps=6), folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"a run of 6 steps, over which the learning rate"):
        run(dataclasses.replace(spec, steps=8), folder=tmp_path)


def test_a_checkpoint_older_than_a_field_resumes_under_its_default(spec, tmp_path):
    run(spec, folder=tmp_path)
    for manifest in (tmp_path / "checkpoints").glob(f"*/{MANIFEST}"):
        kept = json.loads(manifest.read_text())
        assert kept["about"].pop("reduce_dtype") == "own"
        manifest.write_text(json.dumps(kept))
    resumed = []
    run(spec, folder=tmp_path, resumed=resumed.append)
    assert resumed == [spec.steps]
    other = dataclasses.replace(
        spec, data_parallel="bucketed", ranks=2, batch=4, reduce_dtype="bf16"
    )
    with pytest.raises(CheckpointError, match=r"reduce_dtype own there, bf16 here"):
        run(other, folder=tmp_path)


def test_a_curve_without_checkpoints_is_started_again(spec, tmp_path):
    first = run(spec, folder=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    assert run(spec, folder=tmp_path).series == first.series
    assert len(read_curve(tmp_path / CURVE_FILE)) == spec.steps


def test_a_curve_with_a_gap_is_trained_again(spec, tmp_path):
    first = run(spec, folder=tmp_path)
    path = tmp_path / CURVE_FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_bytes("".join(lines[:19]).encode() + b"\xff\n" + "".join(lines[20:]).encode())
    started = []
    with pytest.warns(
        UserWarning, match=r"step-000000024 is skipped, because the loss curve ends at step 19"
    ):
        again = run(spec, folder=tmp_path, resumed=started.append)
    assert started == [18]
    assert again.series == first.series


def test_saving_never_removes_the_new_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    state = {"x": torch.ones(3)}
    checkpoints.save(12, state, {}, keep=1)
    cut_largest_file(tmp_path / "step-000000012")
    checkpoints.save(9, state, {}, keep=1)
    assert [step for step, _, _ in checkpoints.newest()] == [9]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000009"]


def test_the_loss_scale_is_part_of_the_checkpoint(spec, tmp_path):
    spec = dataclasses.replace(spec, precision="fp16", steps=6, checkpoint_every=6)
    trainer = Trainer(spec, build_task(spec), tmp_path)
    trainer.step.scaler._growth_interval = 2
    trainer.run(lambda point: None)
    scale = trainer.step.scaler.get_scale()
    assert scale > 65536  # it grew
    again = Trainer(spec, build_task(spec), tmp_path)
    again.run(lambda point: None)
    assert again.step.scaler.get_scale() == scale


def test_divergence_is_an_error(spec, tmp_path):
    wild = dataclasses.replace(
        spec, learning_rate=100.0, warmup=0, optimizer="sgd", clip=0.0, steps=60
    )
    with pytest.raises(DivergedError, match=r"the loss at step \d+ is"):
        run(wild, folder=tmp_path)


def test_a_loss_that_is_nan_before_any_update_is_not_blamed_on_the_learning_rate(spec, tmp_path):
    task = build_task(spec)
    task.step.accumulate = lambda *_, **__: torch.tensor(float("nan"))
    with pytest.raises(DivergedError, match="nan before any update, so the data or") as error:
        Trainer(spec, task, tmp_path).run(lambda point: None)
    assert "learning-rate" not in str(error.value)


def test_evaluation_does_not_change_training(spec, tmp_path):
    often = run(dataclasses.replace(spec, evaluate_every=1), folder=tmp_path / "often")
    seldom = run(dataclasses.replace(spec, evaluate_every=24), folder=tmp_path / "seldom")
    assert often.series["loss"] == seldom.series["loss"]
    assert torch.tensor(often.series["held_out_bits_per_byte"]).diff().mean() < 0
