"""Random sequences of what people do, under a wrapper and in one process.

`python -m tests.parallel.conformance.sequences FIRST_SEED COUNT WRAPPER...` runs them on two ranks,
and shortens those that differ to the actions that make the difference.
"""

import contextlib
import copy
import datetime
import random
import sys
import warnings

import torch
import torch.distributed as dist
from tests.parallel.conformance.networks import Net
from tests.parallel.conformance.training import (
    OURS,
    FailedError,
    Setup,
    Training,
    whole,
)

from stepgauge.runtime.launch import launch

TIMEOUT = datetime.timedelta(seconds=30)
LENGTHS = (4, 16)
WRITTEN = ("embedding.weight", "blocks.0.linear.weight", "blocks.1.gain", "head.bias")
FROZEN = ("blocks.0.linear.weight", "blocks.1.linear.bias", "head.weight", "blocks.2.gain")
BLOCKS = ((0, 1, 2), (0, 2), (1,), (0, 1, 1))
EXPERTS = (None, None, 0, 1, "by rank")
OFTEN = {"forward": 8, "backward": 7, "backward_alone": 1, "zero_grad": 3, "step": 4}
SELDOM = (
    *("skip", "fail_in_forward", "fail_in_backward", "zero_grad_of_the_module", "drop_gradient"),
    *("scale_gradients", "clip", "norm", "freeze", "unfreeze", "write", "evaluate", "copy"),
    *("save", "load"),
)
WEIGHTS = OFTEN | dict.fromkeys(SELDOM, 1)
# What a wrapper may refuse, by its sentence.
REFUSALS = {
    "zero2": ("take no backward under no_sync()",),
    "zero3": ("zero them before the next",),
}


class Player:
    """Does actions, each a method's name and its arguments, to a module under a wrapper."""

    def __init__(self, setup: Setup):
        self.t = Training(setup, Net())
        self.setup = setup
        self.losses: list[torch.Tensor] = []
        self.is_local = False  # whether gradients are to be averaged yet
        self.seen: dict[str, torch.Tensor] = {}
        self.saved = None

    def play(self, actions) -> dict[str, torch.Tensor]:
        for name, *arguments in actions:
            getattr(self, name)(*arguments)
        self.norm()
        return self.seen | self.t.results()

    def forward(self, step, blocks, expert):
        losses = [
            self.t.loss(
                step, rank, blocks=blocks, expert=rank % 2 if expert == "by rank" else expert
            )
            for rank in self.setup.batches
        ]
        self.losses.append(sum(losses) / len(losses))

    def backward(self):
        if self.losses:
            self.losses.pop(0).backward()
            self.is_local = False

    def backward_alone(self):
        """Nothing may ask for the mean until the next backward outside."""
        if self.losses:
            with self.t.parallel.no_sync():
                self.backward()
            self.is_local = True

    def _average(self):
        if self.is_local:
            self.skip()
            self.forward(90, (0, 1, 2), None)
            self.backward()

    def fail_in_backward(self, index, zeroes):
        self.t.backward_that_fails(70, index)
        if zeroes:
            self.zero_grad(True)
        self.is_local = False

    def fail_in_forward(self, index):
        def fail(*_):
            raise FailedError

        handle = self.t.inner.blocks[index].register_forward_pre_hook(fail)
        with contextlib.suppress(FailedError):
            self.forward(80, (0, 1, 2), None)
        handle.remove()

    def skip(self):
        self.losses.clear()

    def zero_grad(self, set_to_none):
        self.t.optimizer.zero_grad(set_to_none=set_to_none)

    def zero_grad_of_the_module(self):
        self.t.module.zero_grad()

    def step(self):
        self._average()
        self.skip()
        self.t.step()

    def clip(self, max_norm):
        self._average()
        self._see("clipped", self.t.parallel.clip_gradients(max_norm))

    def norm(self):
        self._average()
        self._see("norm", self.t.gradient_norm())

    def scale_gradients(self, factor):
        for parameter in self.t.inner.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def drop_gradient(self, name):
        self.t.parameter(name).grad = None

    def freeze(self, name):
        self.t.parameter(name).requires_grad_(False)

    def unfreeze(self, name):
        self.t.parameter(name).requires_grad_(True)

    def write(self, name, factor):
        self.skip()
        with torch.no_grad():
            self.t.parameter(name).mul_(factor)

    def evaluate(self, step):
        with torch.no_grad():
            self._see("evaluated", self.t.loss(step, 0))

    def copy(self):
        """A copy's weights are what the original's were, and it computes."""
        other = copy.deepcopy(self.t.module)
        with torch.no_grad():
            self._see("copied", other(torch.ones(2, 6, dtype=torch.float64)))

    def save(self):
        """Rank 0 writes, and all read."""
        given = [copy.deepcopy(self.t.parallel.state())]
        if self.setup.wrapper != "none":
            dist.broadcast_object_list(given, group=self.setup.group, group_src=0)
        self.saved = given[0]

    def load(self):
        if self.saved is not None:
            self.skip()
            self.t.parallel.load(copy.deepcopy(self.saved))

    def _see(self, what, value):
        self.seen[f"{len(self.seen)} {what}"] = whole(value)


def actions_of(seed: int, wrapper: str) -> list[tuple]:
    """A sequence in which what the wrappers refuse is rare. Gradients of sharded weights are not
    complete when a backward has failed: they are zeroed.
    """
    draw = random.Random(seed)
    names = draw.choices([*WEIGHTS], [*WEIGHTS.values()], k=draw.randint(*LENGTHS))
    return [(name, *_arguments(name, draw, wrapper)) for name in names]


def _arguments(name: str, draw: random.Random, wrapper: str) -> tuple:
    match name:
        case "forward":
            return draw.randint(0, 9), draw.choice(BLOCKS), draw.choice(EXPERTS)
        case "fail_in_backward":
            return draw.randint(0, 2), draw.random() < 0.5 or wrapper == "zero3"
        case "fail_in_forward":
            return (draw.randint(0, 2),)
        case "zero_grad":
            return (draw.random() < 0.7,)
        case "clip" | "scale_gradients":
            return (draw.choice((0.05, 0.5)),)
        case "drop_gradient" | "freeze" | "unfreeze":
            return (draw.choice(FROZEN),)
        case "write":
            return draw.choice(WRITTEN), draw.choice((0.9, -1.1))
        case "evaluate":
            return (draw.randint(0, 9),)
    return ()


def outcome(actions, setup: Setup) -> dict[str, torch.Tensor] | str:
    """What is seen, or the sentence of what was raised."""
    try:
        return Player(setup).play(actions)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def difference(actions, wrapper: str, group) -> str:
    """The first difference on any rank, the same words on all; empty for none."""
    expected, found = outcome(actions, Setup("none")), outcome(actions, Setup(wrapper, group))
    ours = "" if isinstance(expected, str) else _difference(expected, found, wrapper)
    everyones = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, ours)
    return next(filter(None, everyones), "")


def _difference(expected, found, wrapper: str) -> str:
    if isinstance(found, str):
        refused = any(sentence in found for sentence in REFUSALS.get(wrapper, ()))
        return f"refused: {found}" if refused else found
    for name, value in expected.items():
        ours = found[name].to(value.dtype)  # the norm of nothing has any type
        if not torch.allclose(ours, value, rtol=1e-9, atol=1e-9):
            return f"{name} is off by {(ours - value).abs().max():.2g}"
    return ""


def shortened(actions, wrapper: str, make_group) -> list[tuple]:
    """Without every action that can be left out while the rest differs."""
    place = 0
    while place < len(actions):
        fewer = actions[:place] + actions[place + 1 :]
        words = difference(fewer, wrapper, make_group())
        if words and not words.startswith("refused"):
            actions = fewer
        else:
            place += 1
    return actions


def run(seeds: range, wrappers: list[str]) -> dict[str, list]:
    """On every rank: what differs, as wrapper, seed, words and the shortened actions, and how many
    sequences a wrapper refused.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make_group = lambda: dist.new_group(timeout=TIMEOUT)  # noqa: E731
    found: dict[str, list] = {"different": [], "refused": []}
    group = make_group()
    for seed in seeds:
        for wrapper in wrappers:
            actions = actions_of(seed, wrapper)
            words = difference(actions, wrapper, group)
            if not words:
                continue
            group = make_group()  # ranks may have parted in the middle
            if words.startswith("refused"):
                found["refused"].append((wrapper, seed))
                continue
            fewer = shortened(actions, wrapper, make_group)
            found["different"].append(
                (wrapper, seed, difference(fewer, wrapper, make_group()), fewer)
            )
            if dist.get_rank() == 0:
                print(*found["different"][-1], sep=" | ", flush=True)
    return found


def main() -> None:
    first, count, *wrappers = sys.argv[1:]
    seeds = range(int(first), int(first) + int(count))
    found = launch(run, seeds, wrappers or list(OURS), ranks=2)[0]
    print(f"{count} sequences, {len(found['different'])} differ, {len(found['refused'])} refused")


if __name__ == "__main__":
    main()
