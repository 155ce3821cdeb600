"""Tests that a job ends soon, names the failed rank and leaves no process if a rank fails under any
wrapper. STEPGAUGE_FAILURES=1 tests every phase, wrapper and kind of failure.
"""

import functools
import inspect
import itertools
import multiprocessing
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepgauge.parallel.wrappers import Settings, parallelise
from stepgauge.runtime.launch import RankError, launch
from stepgauge.train.checkpoint import Checkpoints

PHASES = ("wrap", "forward", "backward", "clip", "step", "save")
WRAPPERS = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")
MESSAGES = {
    "raises": "rank 1 of 2: ValueError: wrong here",
    "killed": "rank 1 of 2 was ended by SIGKILL",
    "exits with 0": "rank 1 of 2 ended with status 0 before it returned",
}
EVERYTHING = bool(os.environ.get("STEPGAUGE_FAILURES"))
CASES = (
    [*itertools.product(WRAPPERS, PHASES, MESSAGES)]
    if EVERYTHING
    else [
        ("bucketed", "backward", "raises"),
        ("zero1", "save", "killed"),
        ("zero2", "step", "exits with 0"),
        ("zero3", "backward", "raises"),
        ("zero3", "forward", "killed"),
    ]
)


@pytest.mark.parametrize(("wrapper", "phase", "how"), CASES)
def test_a_rank_fails_under_a_wrapper(wrapper, phase, how, tmp_path):
    failed_at = tmp_path / "failed_at"
    require_end(
        failed_at, MESSAGES[how], lambda: launch(train, wrapper, phase, how, failed_at, ranks=2)
    )


@pytest.mark.parametrize(
    ("wrapper", "rank"),
    [*itertools.product(("zero1", "zero2", "zero3"), (0, 1))] if EVERYTHING else [("zero2", 1)],
)
def test_a_rank_is_killed_while_it_saves_its_share(wrapper, rank, tmp_path):
    """The previous checkpoint is whole, and the next one replaces the incomplete one."""
    failed_at, checkpoints = tmp_path / "failed_at", Checkpoints(tmp_path / "checkpoints")
    require_end(
        failed_at,
        f"rank {rank} of 2 was ended by SIGKILL",
        lambda: launch(save_twice, wrapper, rank, failed_at, checkpoints, ranks=2),
    )
    ((step, folder, about),) = checkpoints.newest()
    assert (step, about) == (1, {"wrapper": wrapper})
    assert checkpoints.load(folder)["model"]["0.weight"].shape == (64, 64)
    checkpoints.save(2, {"weight": torch.ones(2)}, {}, keep=1)
    assert [each.name for each in checkpoints.folder.iterdir()] == ["step-000000002"]


@pytest.mark.parametrize("wrapper", WRAPPERS if EVERYTHING else ("zero3",))
def test_a_rank_waits_for_one_with_fewer_batches(wrapper, tmp_path):
    ended_at = tmp_path / "ended_at"
    message = "rank 0 of 2: RuntimeError: rank 1 has already returned while this rank waited .*"
    require_end(ended_at, message, lambda: launch(train_unequally, wrapper, ended_at, ranks=2))


def train_unequally(wrapper, ended_at):
    parallel = spread(wrapper)
    for _ in range(3 - dist.get_rank()):
        parallel.module(torch.ones(1, 64)).sum().backward()
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
    if dist.get_rank():
        ended_at.write_text(str(time.time()))


def require_end(failed_at, message, run):
    """Checks that run() raises an error that matches `message` within 30 s of the failure and leaves no process.

    Other work can stop any process for longer, so the quickest of three tries counts.
    """
    before, seconds = set(multiprocessing.active_children()), []
    while not seconds or (min(seconds) >= 30 and len(seconds) < 3):
        with pytest.raises(RankError) as raised:
            run()
        seconds.append(time.time() - float(failed_at.read_text()))
        assert re.fullmatch(message, str(raised.value))
        assert not set(multiprocessing.active_children()) - before
    assert min(seconds) < 30, seconds


def save_twice(wrapper, failing, failed_at, checkpoints):
    """Saves twice; the second time a rank is killed while it writes its share."""
    parallel = spread(wrapper)
    parallel.module(torch.ones(1, 64)).sum().backward()
    parallel.optimizer.step()
    share = parallel.shares()
    checkpoints.save_shares(1, share, {"wrapper": wrapper}, keep=1)
    if dist.get_rank() == failing:
        share["last"] = KilledWhenWritten(failed_at)
    checkpoints.save_shares(2, share, {"wrapper": wrapper}, keep=1)


class KilledWhenWritten:
    def __init__(self, failed_at):
        self.failed_at, self.process = failed_at, os.getpid()

    def __reduce__(self):
        is_written = any(frame.function == "write_data" for frame in inspect.stack(0))
        if is_written and os.getpid() == self.process:
            Failing("write", "killed", self.failed_at).fail()
        return KilledWhenWritten, (self.failed_at,)


def train(wrapper, phase, how, failed_at):
    """Trains; rank 1 fails in one phase, and rank 0 continues until it needs rank 1."""
    fails = Failing(phase, how, failed_at)
    fails.at("wrap")
    parallel = spread(wrapper)
    # In backward, the gradients of the third and fourth layer are in flight by then.
    parallel.module.module[1].register_forward_hook(
        lambda _, inputs, output: fails.within_layer(output)
    )
    for _ in range(3):
        parallel.module(torch.ones(1, 64)).sum().backward()
        fails.at("clip")
        parallel.clip_gradients(1.0)
        fails.at("step")
        parallel.optimizer.step()
    fails.at("save")
    assert parallel.state is not None
    parallel.state()
    dist.barrier()


def spread(wrapper):
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    groups = lambda module: [{"params": list(module.parameters())}]  # noqa: E731
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return parallelise(wrapper, module, groups, sgd, settings=Settings(bucket_mb=0.01))


class Failing:
    def __init__(self, phase, how, failed_at):
        self.phase, self.how, self.failed_at = phase, how, failed_at

    def at(self, phase):
        if phase == self.phase and dist.get_rank() == 1:
            self.fail()

    def fail(self):
        self.failed_at.write_text(str(time.time()))
        match self.how:
            case "raises":
                raise ValueError("wrong here")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exits with 0":
                os._exit(0)

    def within_layer(self, output):
        self.at("forward")
        output.register_hook(lambda _: self.at("backward"))
