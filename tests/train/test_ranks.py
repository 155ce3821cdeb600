"""Training on ranks: the curve of one process, and a run that goes on under another wrapper on
other ranks.
"""

import os
import subprocess
import sys

import pytest
import torch

from stepgauge.bench import train as bench_train
from stepgauge.runtime.launch import RankError, launch
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.train import TrainSpec
from stepgauge.train.loop import read_curve


def spec(**changes):
    model = ModelSpec.preset("nano", context_length=16)
    fields = {
        "batch": 6,
        "accumulation": 2,
        "steps": 6,
        "warmup": 2,
        "checkpoint_every": 2,
        "evaluate_every": 6,
    }
    return TrainSpec(model=model, size="nano", evaluate_windows=4, **{**fields, **changes})


def train(spec, folder, stop_at):
    def report(point):
        if point.step == stop_at:
            raise KeyError("stop here")

    torch.manual_seed(7)  # nothing may depend on it
    bench_train.run(spec, folder=folder, report=report)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train(spec(), folder, None)
    return read_curve(folder / "curve.jsonl")


@pytest.mark.parametrize(
    ("first", "second", "ranks"),
    [("bucketed", "zero1", 3), ("zero2", "zero3", 2)],
)
def test_a_run_goes_on_under_another_wrapper(tmp_path, alone, first, second, ranks):
    with pytest.raises(RankError, match="stop here"):
        launch(train, spec(data_parallel=first, ranks=2), tmp_path, 6, ranks=2)
    assert [point.step for point in read_curve(tmp_path / "curve.jsonl")] in (
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
    )
    launch(train, spec(data_parallel=second, ranks=ranks), tmp_path, None, ranks=ranks)
    curve = read_curve(tmp_path / "curve.jsonl")
    assert len(curve) == 6
    for ours, theirs in zip(curve, alone, strict=True):
        assert abs(ours.loss - theirs.loss) < 2e-5, ours
    assert abs(curve[-1].held_out - alone[-1].held_out) < 2e-5


def test_a_run_of_ranks_goes_on_alone(tmp_path, alone):
    with pytest.raises(RankError, match="stop here"):
        launch(train, spec(data_parallel="zero3", ranks=2), tmp_path, 6, ranks=2)
    train(spec(), tmp_path, None)
    losses = [point.loss for point in read_curve(tmp_path / "curve.jsonl")]
    assert max(abs(a - b.loss) for a, b in zip(losses, alone, strict=True)) < 2e-5


def test_the_command_under_torchrun(tmp_path, alone):
    options = [
        "--size",
        "nano",
        "--context",
        "16",
        "--batch",
        "6",
        "--accumulation",
        "2",
        "--warmup",
        "2",
    ]
    options += [
        "--checkpoint-every",
        "2",
        "--evaluate-every",
        "6",
        "--evaluate-windows",
        "4",
        "--device",
        "cpu",
    ]
    options += ["--steps", "6", "--ranks", "2", "--out", str(tmp_path)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "stepgauge",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "train", *options, "--data-parallel", "bucketed"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("held out") == 1  # one rank speaks for all
    curve = read_curve(tmp_path / "curve.jsonl")
    assert len(curve) == 6
    assert (
        max(abs(ours.loss - theirs.loss) for ours, theirs in zip(curve, alone, strict=True)) < 2e-5
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"ranks": 4, "data_parallel": "flat"},
            "batch is 6, which 4 ranks do not divide; choose a multiple",
        ),
        ({"ranks": 2}, "ranks is 2; --data-parallel says how they train"),
        ({"data_parallel": "zero3", "compile": "on"}, "zero3 gathers weights in Python"),
        (
            {"data_parallel": "zero2", "precision": "fp16"},
            "precision is 'fp16', whose loss scale needs",
        ),
        (
            {"data_parallel": "zero3", "reduce_dtype": "bf16"},
            "reduce_dtype is 'bf16', which --data-parallel zero3 has no",
        ),
        (
            {"data_parallel": "torch-ddp", "reduce_dtype": "bf16"},
            "torch-ddp compresses on GPUs only",
        ),
    ],
)
def test_what_cannot_be_is_said(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        spec(**changes)
