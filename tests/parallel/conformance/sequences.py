"""Random sequences of what people do, under a wrapper and in one process.

`python -m tests.parallel.conformance.sequences FIRST_SEED COUNT WRAPPER...` runs them on two ranks,
and shortens those that differ to the actions that make the difference.
"""

import datetime
import random
import sys
import warnings

import torch
import torch.distributed as dist
from tests.parallel.conformance.player import Player
from tests.parallel.conformance.training import OURS, Setup

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
    *("save", "load", "accumulate", "scaled_step", "average_weights", "differentiate_by_input"),
    *("differentiate_by_weights", "call_with_others", "add_group", "edit_state", "reset_state"),
    *("change_rate", "load_weights", "to_and_back", "hook"),
)
WEIGHTS = OFTEN | dict.fromkeys(SELDOM, 1)
# What a wrapper may refuse, by its sentence.
REFUSALS = {
    "zero2": (
        "cannot add to it; set gradients to None first",
        "GradScaler sees only this rank's gradients",
    ),
    "zero3": (
        "zero them before the next",
        "cannot return gradients of sharded weights",
        "register it before",
        "tie it again",
    ),
}
ALWAYS_REFUSED = {"zero2": "scaled_step", "zero3": "differentiate_by_weights"}
RAISES = "one process raises"
REPLACED = "wrap the module again"  # any may refuse a parameter that was replaced


def actions_of(seed: int, wrapper: str) -> list[tuple]:
    """A sequence in which what the wrappers refuse is rare. Gradients of sharded weights are not
    complete when a backward has failed: they are zeroed.
    """
    draw = random.Random(seed)
    names = draw.choices([*WEIGHTS], [*WEIGHTS.values()], k=draw.randint(*LENGTHS))
    network = ("network", draw.random() < 0.2, draw.random() < 0.2)
    played = [(name, *_arguments(name, draw, wrapper)) for name in names]
    return [network, *(each for each in played if each[0] != ALWAYS_REFUSED.get(wrapper))]


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
        case "evaluate" | "differentiate_by_input":
            return (draw.randint(0, 9),)
        case "differentiate_by_weights":
            return draw.randint(0, 9), draw.choice(FROZEN)
        case "accumulate":
            steps = [draw.randint(0, 9) for _ in range(draw.choice((2, 3, 5)))]
            return steps, draw.choice((None, None, *FROZEN))
        case "scaled_step":
            return draw.randint(0, 9), draw.random() < 0.3
        case "call_with_others" | "edit_state":
            return (draw.choice((0.5, 1.5)),)
        case "load_weights":
            return draw.choice(WRITTEN), draw.random() < 0.1
        case "hook":
            return draw.choice(FROZEN), draw.choice((0.5, 2.0))
    return ()


def outcome(actions, setup: Setup) -> dict[str, torch.Tensor] | str:
    """What is seen, or the sentence of what was raised."""
    try:
        (_, tied, late), *others = actions
        return Player(setup, tied=tied, late=late).play(others)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def difference(actions, wrapper: str, group) -> str:
    """The first difference on each rank, the same words on all; empty for none."""
    expected, found = outcome(actions, Setup("none")), outcome(actions, Setup(wrapper, group))
    ours = RAISES if isinstance(expected, str) else _difference(expected, found, wrapper)
    everyones = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, ours)
    return " / ".join(dict.fromkeys(filter(None, everyones)))


def _difference(expected, found, wrapper: str) -> str:
    if isinstance(found, str):
        refused = any(sentence in found for sentence in (REPLACED, *REFUSALS.get(wrapper, ())))
        return f"refused: {found}" if refused else found
    for name, value in expected.items():
        if name not in found:
            return f"{name} is not there"
        ours = found[name].to(value.dtype)  # the norm of nothing has any type
        if not torch.allclose(ours, value, rtol=1e-9, atol=1e-9, equal_nan=True):
            return f"{name} is off by {(ours - value).abs().max():.2g}"
    return ""


def shortened(actions, wrapper: str, make_group) -> list[tuple]:
    """Without every action that can be left out while the rest differs."""
    place = 1  # the first is the network
    while place < len(actions):
        fewer = actions[:place] + actions[place + 1 :]
        words = difference(fewer, wrapper, make_group())
        if words and not words.startswith(("refused", RAISES)):
            actions = fewer
        else:
            place += 1
    return actions


def run(seeds: range, wrappers: list[str]) -> dict[str, list]:
    """On every rank: what differs, as wrapper, seed, words and the shortened actions; what a wrapper
    refused, and what raises in one process.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make_group = lambda: dist.new_group(timeout=TIMEOUT)  # noqa: E731
    found: dict[str, list] = {"different": [], "refused": [], "raises": []}
    group = make_group()
    for seed in seeds:
        for wrapper in wrappers:
            actions = actions_of(seed, wrapper)
            words = difference(actions, wrapper, group)
            if not words:
                continue
            group = make_group()  # ranks may have parted in the middle
            if words.startswith(("refused", RAISES)):
                found["refused" if words != RAISES else "raises"].append((wrapper, seed))
                continue
            fewer = shortened(actions, wrapper, make_group)
            again = difference(fewer, wrapper, make_group()) or f"{words}, but not again"
            found["different"].append((wrapper, seed, again, fewer))
            if dist.get_rank() == 0:
                print(*found["different"][-1], sep=" | ", flush=True)
    return found


def main() -> None:
    first, count, *wrappers = sys.argv[1:]
    seeds = range(int(first), int(first) + int(count))
    found = launch(run, seeds, wrappers or list(OURS), ranks=2)[0]
    print(f"{count} sequences:", *(f"{len(cases)} {kind}" for kind, cases in found.items()))


if __name__ == "__main__":
    main()
