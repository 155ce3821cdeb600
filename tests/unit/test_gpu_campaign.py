"""benchmarks/gpu_campaign.py: which steps run when, and what is kept of them."""

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WRITES_A_RECORD = "open(r'{work}/rows.jsonl', 'w').write('1\\n')"


@pytest.fixture
def campaign(monkeypatch):
    specification = importlib.util.spec_from_file_location(
        "gpu_campaign", BENCHMARKS / "gpu_campaign.py"
    )
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "gpu_campaign", module)
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    return module


@pytest.fixture
def arguments(tmp_path):
    for folder in ("out", "work"):
        (tmp_path / folder).mkdir()
    return argparse.Namespace(
        out=tmp_path / "out", work=tmp_path / "work", gpus=["5", "6"], small=False, seconds=100.0
    )


def test_every_step_names_files_that_exist(campaign):
    for name, step in campaign.steps().items():
        paths = [part for part in (*step.command, *step.on_gpus) if part.startswith("/")]
        assert paths and all(Path(path).exists() for path in paths), name
        lists = [part for parts in step.on_gpus for part in parts.split(",") if "_gpu" in part]
        assert all((BENCHMARKS / "validation" / f"{each}.toml").exists() for each in lists), name


def test_steps_share_the_gpus_and_a_failure_does_not_end_the_run(campaign, arguments):
    known = {
        "fails": campaign.Step(1, ["-c", "import os, sys; sys.exit(os.environ['OUT'])"], 60),
        "writes": campaign.Step(1, ["-c", WRITES_A_RECORD], 60),
        "large": campaign.Step(3, [], 60),
        "prints": campaign.Step(
            2, ["-c", "import os; print('on', os.environ['CUDA_VISIBLE_DEVICES'])"], 60
        ),
    }
    run = campaign.Run(known, arguments)
    run.run(list(known))
    results = sorted(line.partition(" s, ")[0].rpartition(", ")[0] for line in run.results)
    assert results == ["fails: failed with 1", "large: not started", "prints: ok", "writes: ok"]
    assert run.failed
    assert (arguments.out / "writes.jsonl").read_text() == "1\n"
    assert "on 5,6" in (arguments.out / "log.txt").read_text()


def test_an_interrupted_run_and_a_step_at_its_limit_leave_no_process(
    campaign, arguments, monkeypatch
):
    sleep = campaign.Step(2, ["-c", "import time; time.sleep(100)"], 60)
    step = campaign.Running("sleep", sleep, {0}, arguments, left=0.0)
    while not step.poll():
        pass
    assert step.result == "stopped at its limit of 0 s" and step.process.poll() is not None

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign.Running, "poll", interrupted)
    run = campaign.Run({"sleep": sleep}, arguments)
    with pytest.raises(KeyboardInterrupt):
        run.run(["sleep"])
    assert run.running[0].process.poll() is not None


def test_gpus_are_those_that_the_user_made_visible(campaign, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert campaign.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert campaign.visible_gpus() == ["2", "3"]


@pytest.mark.parametrize("num_cores", [1, 2, 8])
def test_each_gpu_has_its_share_of_the_cores(campaign, monkeypatch, num_cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    shares = [campaign.cores_of({gpu}, 4) for gpu in range(4)]
    assert all(shares) and set.union(*shares) == set(range(num_cores))
