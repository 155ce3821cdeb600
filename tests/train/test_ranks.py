"""Training on several ranks has the curve of one process, and can be resumed under another layout."""

import contextlib
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
    model = ModelSpec.preset("nano", num_layers=4, context_length=16)
    fields = {
        "batch": 6,
        "accumulation": 2,
        "steps": 10,
        "warmup": 2,
        "checkpoint_every": 1,
        "evaluate_every": 2,
    }
    fields |= {"corpus": __file__, "evaluate_windows": 4}
    return TrainSpec(model=model, size="nano", **{**fields, **changes})


def train(spec, folder, stop_at):
    def report(point):
        if point.step == stop_at:
            raise KeyError("stop here")

    torch.manual_seed(7)  # the curve must not depend on it
    bench_train.run(spec, folder=folder, report=report)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train(spec(), folder, None)
    return read_curve(folder / "curve.jsonl")


# Each launch trains under its layouts in turn. Every run is stopped one step after its newest
# checkpoint; the last one of a launch ends the processes.
LAUNCHES = (
    ("dp2 bucketed", "tp2", "dp2 zero2", "pp2 zbv m3"),
    ("dp3 zero1",),
    ("dp2 zero3", "pp2 1f1b m1"),
)


def train_under(layouts, folder, first_stop):
    for number, layout in enumerate(layouts):
        last = number == len(layouts) - 1
        with contextlib.nullcontext() if last else pytest.raises(KeyError, match="stop here"):
            train(
                spec(layout=layout, balance=("step", "time")[number % 2]),
                folder,
                first_stop + number,
            )


def check_all_ranks_wrote(folder, layout):
    """Checks that every rank wrote its share of the newest checkpoint."""
    newest = max((folder / "checkpoints").iterdir())
    written = [path.stat().st_size for path in newest.glob("*.distcp")]
    assert len(written) == spec(layout=layout).ranks, layout
    assert max(written) < 0.75 * sum(written), (layout, written)


def test_a_run_resumes_under_other_layouts(tmp_path, alone):
    stop = 2
    for layouts in LAUNCHES:
        with pytest.raises(RankError, match="stop here"):
            launch(train_under, layouts, tmp_path, stop, ranks=spec(layout=layouts[0]).ranks)
        stop += len(layouts)
        assert len(read_curve(tmp_path / "curve.jsonl")) == stop - 1, layouts
        check_all_ranks_wrote(tmp_path, layouts[-1])
    train(spec(), tmp_path, None)
    curve = read_curve(tmp_path / "curve.jsonl")
    for point, expected in zip(curve, alone, strict=True):
        assert abs(point.loss - expected.loss) < 2e-5, point
        assert (point.held_out is None) == (expected.held_out is None)
        if point.held_out is not None:
            assert abs(point.held_out - expected.held_out) < 2e-5, point


def test_the_command_under_torchrun(tmp_path, alone):
    options = {"size": "nano", "context": 16, "num-layers": 4, "batch": 6, "accumulation": 2}
    options |= {"steps": 10, "warmup": 2, "checkpoint-every": 2, "evaluate-every": 10}
    options |= {"evaluate-windows": 4, "device": "cpu", "ranks": 2, "data-parallel": "bucketed"}
    options |= {"corpus": __file__}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "stepgauge", "train", "--out", str(tmp_path)]
    command += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("held out") == 1  # only one rank prints
    curve = read_curve(tmp_path / "curve.jsonl")
    assert len(curve) == 10
    for point, expected in zip(curve, alone, strict=True):
        assert abs(point.loss - expected.loss) < 2e-5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"ranks": 4, "data_parallel": "flat"},
            "batch is 6, which dp4 does not divide; choose a multiple",
        ),
        ({"ranks": 2}, "ranks is 2, which needs --layout or --data-parallel"),
        (
            {"ranks": 2, "data_parallel": "zero3", "compile": "reduce-overhead"},
            "CUDA graphs need weights at fixed addresses; zero3 unshards and frees them",
        ),
        (
            {"ranks": 2, "data_parallel": "zero3", "checkpointing": "feed-forward"},
            "which under zero3 needs compiled blocks: choose --compile blocks",
        ),
        (
            {"ranks": 2, "data_parallel": "zero2", "precision": "fp16"},
            "precision is 'fp16', whose loss scaling needs",
        ),
        (
            {"ranks": 2, "data_parallel": "zero3", "reduce_dtype": "bf16"},
            "reduce_dtype is 'bf16', which has no effect with zero3",
        ),
        (
            {"ranks": 2, "data_parallel": "torch-ddp", "reduce_dtype": "bf16"},
            "which torch-ddp supports only on GPUs",
        ),
        ({"layout": "tp2", "data_parallel": "zero1"}, "the layout includes the wrapper"),
        ({"layout": "tp2", "ranks": 4}, "ranks is 4; layout 'tp2' has 2"),
        ({"layout": "dp2 torch-zero1"}, "checkpoints of torch-zero1 cannot be loaded on other"),
        ({"layout": "pp8 1f1b m2"}, "1f1b on 8 ranks has 8 stages; the network has 4 blocks"),
    ],
)
def test_unsupported_combinations_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        spec(**changes)
