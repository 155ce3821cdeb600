"""A rank that fails in any phase of any wrapper: the job ends soon, names the rank, and leaves no
process. STEPGAUGE_FAILURES=1 tries every phase, wrapper and way to fail.
"""

import itertools
import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepgauge.parallel.wrappers import Settings, parallelise
from stepgauge.runtime.launch import RankError, launch

PHASES = ("wrap", "forward", "backward", "clip", "step", "save")
WRAPPERS = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")
WORDS = {
    "raises": "rank 1 of 2: ValueError: wrong here",
    "killed": "rank 1 of 2 was ended by SIGKILL",
    "exits with 0": "rank 1 of 2 ended with status 0 before it returned",
}
CASES = (
    [*itertools.product(WRAPPERS, PHASES, WORDS)]
    if os.environ.get("STEPGAUGE_FAILURES")
    else [
        ("bucketed", "backward", "raises"),
        ("zero1", "save", "killed"),
        ("zero2", "step", "exits with 0"),
        ("zero3", "backward", "raises"),
        ("zero3", "forward", "killed"),
    ]
)


@pytest.mark.parametrize(("wrapper", "phase", "how"), CASES)
def test_a_rank_that_fails_within_a_wrapper(wrapper, phase, how, tmp_path):
    before, failed_at = set(multiprocessing.active_children()), tmp_path / "failed_at"
    with pytest.raises(RankError) as raised:
        launch(train, wrapper, phase, how, failed_at, ranks=2)
    assert str(raised.value) == WORDS[how]
    assert time.time() - float(failed_at.read_text()) < 30
    assert not set(multiprocessing.active_children()) - before


def train(wrapper, phase, how, failed_at):
    """Rank 1 fails in one phase; the other goes on until it needs it."""
    fails = Failing(phase, how, failed_at)
    fails.at("wrap")
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    groups = lambda module: [{"params": list(module.parameters())}]  # noqa: E731
    settings = Settings(bucket_mb=0.01)
    parallel = parallelise(wrapper, module, groups, torch.optim.SGD, settings=settings)
    # In backward the gradients of the third and fourth layer are on their way by then.
    module[1].register_forward_hook(lambda _, inputs, output: fails.within_layer(output))
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


class Failing:
    def __init__(self, phase, how, failed_at):
        self.phase, self.how, self.failed_at = phase, how, failed_at

    def at(self, phase):
        if phase != self.phase or dist.get_rank() != 1:
            return
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
