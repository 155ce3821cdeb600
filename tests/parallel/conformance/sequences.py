"""Plays random sequences of a user's actions under a wrapper and in one process, and compares them.

`python -m tests.parallel.conformance.sequences FIRST_SEED COUNT WRAPPER...` plays them on two ranks,
and shortens those that differ to the actions that cause the difference.
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
OFTEN = {"forward": 8, "backward": 7, "backward_under_no_sync": 1, "zero_grad": 3, "step": 4}
SELDOM = (
    *("skip", "fail_in_forward", "fail_in_backward", "zero_grad_of_the_module", "drop_gradient"),
    *("scale_gradients", "clip", "norm", "freeze", "unfreeze", "write", "evaluate", "copy"),
    *("save", "load", "accumulate", "scaled_step", "average_weights", "differentiate_by_input"),
    *("differentiate_by_weights", "call_with_others", "add_group", "edit_state", "reset_state"),
    *("change_rate", "load_weights", "to_and_back", "hook"),
)
WEIGHTS = OFTEN | dict.fromkeys(SELDOM, 1)
# Parts of the messages with which a wrapper may raise.
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
REPLACED = "wrap the module again"  # any wrapper may raise for a parameter that was replaced


def actions_of(seed: int, wrapper: str) -> list[tuple]:
    """Returns a sequence with few actions that the wrapper refuses. Under zero3 a failed backward
    leaves incomplete gradients, so they are zeroed.
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
    """Plays the actions; returns the values that were seen, or the message that was raised."""
    try:
        (_, tied, late), *others = actions
        return Player(setup, tied=tied, late=late).play(others)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def difference(actions, wrapper: str, group) -> str:
    """Describes the first difference on each rank, in the same text on all ranks; "" if there is none."""
    expected, seen = outcome(actions, Setup("none")), outcome(actions, Setup(wrapper, group))
    on_this_rank = RAISES if isinstance(expected, str) else _difference(expected, seen, wrapper)
    on_ranks = [""] * dist.get_world_size()
    dist.all_gather_object(on_ranks, on_this_rank)
    return " / ".join(dict.fromkeys(filter(None, on_ranks)))


def _difference(expected, seen, wrapper: str) -> str:
    if isinstance(seen, str):
        refused = any(message in seen for message in (REPLACED, *REFUSALS.get(wrapper, ())))
        return f"refused: {seen}" if refused else seen
    for name, value in expected.items():
        if name not in seen:
            return f"{name} is missing"
        actual = seen[name].to(value.dtype)  # the dtype of the norm of no gradients is arbitrary
        if not torch.allclose(actual, value, rtol=1e-9, atol=1e-9, equal_nan=True):
            return f"{name} is off by {(actual - value).abs().max():.2g}"
    return ""


def shortened(actions, wrapper: str, make_group) -> list[tuple]:
    """Removes every action without which the rest still differs."""
    position = 1  # the first is the network
    while position < len(actions):
        fewer = actions[:position] + actions[position + 1 :]
        text = difference(fewer, wrapper, make_group())
        if text and not text.startswith(("refused", RAISES)):
            actions = fewer
        else:
            position += 1
    return actions


def run(seeds: range, wrappers: list[str]) -> dict[str, list]:
    """Plays sequences, on every rank. Returns those that differ, as wrapper, seed, text and shortened
    actions, and wrapper and seed of those that a wrapper refused or that raise in one process.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make_group = lambda: dist.new_group(timeout=TIMEOUT)  # noqa: E731
    found: dict[str, list] = {"different": [], "refused": [], "raises": []}
    group = make_group()
    for seed in seeds:
        for wrapper in wrappers:
            actions = actions_of(seed, wrapper)
            text = difference(actions, wrapper, group)
            if not text:
                continue
            group = make_group()  # a rank may have left the old one in mid-collective
            if text.startswith(("refused", RAISES)):
                found["refused" if text != RAISES else "raises"].append((wrapper, seed))
                continue
            fewer = shortened(actions, wrapper, make_group)
            again = difference(fewer, wrapper, make_group()) or f"{text}, but not reproducibly"
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
