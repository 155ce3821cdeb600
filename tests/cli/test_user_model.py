"""A user's own network in every command that takes one."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from stepgauge.report.run_page import run_page
from stepgauge.spec.store import RunStore

MODEL = """
import argparse, os, sys, torch
from torch import nn
options = argparse.ArgumentParser().parse_args()  # the file must not see the command's own options
from blocks import WIDTH
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 2))
    def forward(self, x):
        return self.layers(x)
def net():
    return Net(), (torch.ones(2, WIDTH), torch.tensor([0, 1])), nn.CrossEntropyLoss()
def breaks():
    raise RuntimeError("no such tile")
def leaves():
    sys.exit(3)
def dies():
    os.kill(os.getpid(), 15)
def stack():
    from stepgauge.spec.plan.tensor import Rule
    layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    table = {"0": Rule("column"), "2": Rule("row")}
    return {"module": layers, "batch": torch.ones(2, WIDTH), "table": table}
"""
QUICK = ("--device", "cpu", "--steps", "1", "--warmup", "1")


@pytest.fixture
def file(tmp_path):
    (tmp_path / "blocks.py").write_text("WIDTH = 4")
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


SCRIPT = """
import torch
from torch import nn
print("loading")
data = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(3)]
class Net(nn.Linear):
    def forward(self, x):
        print("forward")
        return super().forward(x)
model = Net(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
def net():
    return model, data[0], nn.CrossEntropyLoss()
"""


def rows(folder):
    return RunStore(folder).read().records


def samples(record):
    """Returns the samples of a step, from the throughput and the step's median."""
    return round(record.median("samples_per_s") * record.median("step_ms") / 1e3, 3)


def test_a_users_model_is_swept_and_measured_again_if_its_source_changes(stepgauge, tmp_path, file):
    run = tmp_path / "run"
    command = ("bench", "step", *QUICK, "--seconds", "0", "--model", f"{file}:net", "--out", run)
    status, out, err = stepgauge(*command, "--precision", "fp32", "bf16")
    assert status == 0, err
    assert "net" in out and "small" not in out and "tokens" not in out
    first, second = rows(run)
    assert (first.spec["precision"], second.spec["precision"]) == ("fp32", "bf16")
    assert first.spec["model"]["network"] == "user" and "d_model" not in str(first.spec)
    assert "1 of 1 rows were already" in stepgauge(*command)[2]
    (tmp_path / "blocks.py").write_text("WIDTH = 5")
    assert "already" not in stepgauge(*command)[2]
    assert len(rows(run)) == 3


def test_a_script_that_prints_on_import_does_not_spoil_tables(tmp_path):
    """Without a main guard the script trains in each process; its output goes to standard error."""
    (tmp_path / "script.py").write_text(SCRIPT)
    model = ("--model", f"{tmp_path / 'script.py'}:net", "--out", tmp_path / "run")
    command = [sys.executable, "-m", "stepgauge", "bench", "step", *QUICK, "--seconds", "0", *model]
    done = subprocess.run([*command, "--format", "csv"], capture_output=True, text=True)
    assert done.returncode == 0 and "loading" in done.stderr and "forward" in done.stderr
    head, row = done.stdout.splitlines()
    assert head.startswith("size,") and row.startswith("script.py:net,fp32")


def test_the_examples_residual_network_can_be_trained(stepgauge, tmp_path, monkeypatch):
    """It brings a new batch for each step, held-out batches and an optimizer."""
    file = Path(__file__).parents[2] / "examples/resnet.py"
    monkeypatch.chdir(tmp_path)
    command = ("train", "--device", "cpu", "--steps", "4")
    status, out, err = stepgauge(*command, "--model", f"{file}:resnet")
    assert status == 0 and ", held out 2." in out and "77,818 parameters" in out, err
    (row,) = rows(tmp_path / "runs" / "train-resnet-resnet")
    first, last = row.median("first_loss"), row.median("last_loss")
    assert first != last and abs(first - math.log(10)) < 0.3 and abs(last - math.log(10)) < 0.3
    assert row.environment["optimizer"] == "user SGD"


def test_failing_user_code_is_named_by_file_and_line(stepgauge, tmp_path, file):
    models = [f"{file}:{name}" for name in ("breaks", "leaves", "dies")]
    command = ("bench", "step", *QUICK, "--model", *models, "--out", tmp_path / "run")
    status, _, err = stepgauge(*command)
    assert status == 1 and "Traceback" not in err
    assert [row.note for row in rows(tmp_path / "run")] == [
        "mine.py:15: RuntimeError: no such tile",
        "mine.py:17: SystemExit: 3",
        "the measuring process was ended by SIGTERM",
    ]
    assert f"tracebacks of the failed rows: {tmp_path / 'run' / 'failures.log'}" in err
    types = ("profile", "dtypes", "--device", "cpu", "--out", tmp_path / "types")
    status, _, err = stepgauge(*types, "--model", f"{file}:breaks")
    assert status == 1 and "failed: mine.py:15: RuntimeError: no such tile" in err


def test_a_file_that_ends_the_process_is_one_sentence(stepgauge, tmp_path, file):
    (tmp_path / "ends.py").write_text("import os\nos.kill(os.getpid(), 15)")
    for model, message in (
        (f"{tmp_path / 'ends.py'}:net", "was ended by SIGTERM"),
        (f"{file}:nets", "has no function 'nets'; it has net, breaks, leaves, dies"),
    ):
        status, _, err = stepgauge("bench", "step", "--device", "cpu", "--model", model)
        assert status == 2 and message in err and "Traceback" not in err


def test_five_commands_measure_one_model_into_one_report(stepgauge, tmp_path, file):
    run = tmp_path / "run"
    asked = ("--device", "cpu", "--model", f"{file}:net", "--out", run)
    status, out, err = stepgauge("profile", "dtypes", *asked)
    assert status == 0 and "layers.*.weight" in out, err
    status, out, err = stepgauge("profile", "step", *asked, *QUICK[2:], "--seconds", "0")
    assert status == 0 and "layers.* (GELU)" in out, err
    status, out, err = stepgauge("profile", "memory", *asked)
    assert status == 0 and "net" in out, err
    status, out, err = stepgauge(
        "bench", "data-parallel", *asked, *QUICK[2:], "--wrapper", "bucketed", "zero3",
        "--format", "csv",
    )  # fmt: skip
    assert status == 0, err
    spread = [row for row in rows(run) if row.kind == "data-parallel"]
    assert [row.spec["wrapper"] for row in spread] == ["bucketed", "zero3"]
    assert [samples(row) for row in spread] == [4, 4] and "samples/s" in out
    assert stepgauge("report", run)[0] == 0
    text = (run / "report.html").read_text()
    kinds = ("profile", "memory", "dtypes", "data-parallel")
    assert all(f'<section id="{kind}">' in text for kind in kinds)
    assert len(text) < 1.5 * 2**20


def test_a_users_model_is_trained_and_errors_of_its_file_are_one_sentence(
    stepgauge, tmp_path, file
):
    quick = ("--device", "cpu", "--steps", "3", "--warmup", "1")
    command = ("train", *quick, "--out", tmp_path / "run", "--model")
    status, out, err = stepgauge(*command, f"{file}:net", "--ranks", "2", "--data-parallel", "flat")
    assert status == 0 and out.startswith("loss 0.") and "58 parameters" in out, err
    (row,) = rows(tmp_path / "run")
    assert row.median("steps_per_s") > 0 and row.spec["model"]["factory"] == "net"
    # rank 0 says it, in its own process
    again = [sys.executable, "-m", "stepgauge", "train", *quick, "--out", str(tmp_path / "again")]
    done = subprocess.run([*again, "--model", f"{file}:net"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "every step trains on this one batch" in " ".join(done.stderr.split())
    for name, message in (
        ("breaks", "stepgauge: mine.py:15: RuntimeError: no such tile"),
        ("leaves", "stepgauge: mine.py:17: RuntimeError: SystemExit: 3"),
        ("dies", "was ended by SIGTERM"),
    ):
        status, _, err = stepgauge(*command, f"{file}:{name}")
        assert status == 1 and message in err and "Traceback" not in err


def test_a_users_model_is_timed_under_layouts_with_a_data_axis(stepgauge, tmp_path, file):
    run = tmp_path / "run"
    command = ("bench", "layout", *QUICK, "--model", f"{file}:net", "--out", run)
    layouts = ("none", "dp2 zero1")
    status, out, err = stepgauge(*command, "--accumulation", "2", "--layout", *layouts)
    assert status == 0, err
    assert "net" in out and "small" not in out
    for row, weights in zip(rows(run), (232, 232), strict=True):
        assert row.median("parameter_bytes") == weights and row.median("step_ms") > 0
        assert row.spec["model"]["factory"] == "net" and "tokens_per_s" not in row.metrics
    assert rows(run)[1].median("data_exposed_ms") is not None
    assert [samples(row) for row in rows(run)] == [4, 8]
    whole, shared = (row.median("optimizer_bytes") for row in rows(run))
    assert shared < 0.8 * whole
    assert "Which layout trains fastest" in run_page(rows(run), run).html()
    assert "2 of 2 rows" in stepgauge(*command, "--accumulation", "2", "--layout", *layouts)[2]
    for layout, message in (
        ("tp2", "give a table of names and rules, which the factory returns as 'table'"),
        ("pp2 1f1b", "the factory's module is a Net; a pipeline cuts an nn.Sequential"),
    ):
        for asked in ("bench", "layout"), ("train",):
            status, _, err = stepgauge(*asked, "--model", f"{file}:net", "--layout", layout)
            assert status == 1 and message in err
    for asked in ("bench", "layout"), ("train",):
        status, _, err = stepgauge(*asked, "--model", f"{file}:net", "--layout", "dp2 cp2")
        assert status == 2 and "a user's model has no context axis" in err


def test_a_users_model_is_timed_under_tensor_and_pipeline_axes(stepgauge, tmp_path, file):
    command = ("bench", "layout", *QUICK, "--model", f"{file}:stack", "--out", tmp_path / "run")
    status, _, err = stepgauge(*command, "--layout", "none", "tp2", "pp2 1f1b m2")
    assert status == 0, err
    alone, tensor, pipeline = rows(tmp_path / "run")
    assert [samples(row) for row in (alone, tensor, pipeline)] == [2, 2, 2]
    weights = [row.median("parameter_bytes") // 4 for row in (alone, tensor, pipeline)]
    assert weights == [40 + 72 + 18, 20 + 32 + 8 + 18, 72 + 18]
    assert tensor.median("tensor_exposed_ms") is not None
    assert pipeline.median("busiest_rank_ms") > 0 < pipeline.median("pipeline_exposed_ms")
