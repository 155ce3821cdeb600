"""Runs every behaviour under every wrapper, in one launch of ranks, and says what each cell is.

`python -m tests.parallel.conformance.table WORDS...` prints the cells of behaviours, rooms and
wrappers of these names, or of all.
"""

import datetime
import gc
import inspect
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from tests.parallel.conformance import gradients, modules, optimizers, weights
from tests.parallel.conformance.training import OURS, WRAPPERS, Setup

from stepgauge.runtime.launch import launch

TIMEOUT = datetime.timedelta(seconds=60)
RIGHT, REFUSED, WRONG, IDLE = "right", "refused", "wrong", "not asked"

# what a rank says that waits for another which has refused
WAITS = ("timed out", "Timed out", "timeout", "Connection closed")

TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
# torch's DDP copies and pickles wrappers of the default group only.
COPIES = (
    "a deep copy that averages",
    "a deep copy that is trained",
    "averaged model of torch",
    "pickled",
)
ROOMS = (gradients, weights, modules, optimizers)
BEHAVIOURS = {
    name.replace("_", " "): function
    for room in ROOMS
    for name, function in inspect.getmembers(room, inspect.isfunction)
    if function.__module__ == room.__name__ and not name.startswith(("_", "fails"))
}
ZERO = ("zero1", "zero2")
# Cells of ours that raise, and a part of the sentence.
REFUSALS = {
    ("backward with create graph", OURS): "create_graph=True",
    ("a parameter replaced after wrapping", OURS): "wrap the module again",
    ("weights assigned by load state dict", OURS[:-1]): "wrap the module again",
    ("built on the meta device and loaded", OURS[:-1]): "is on the meta device",
    ("built on the meta device and initialised", OURS[:-1]): "is on the meta device",
    ("sparse gradients", OURS): "is sparse; only dense gradients can be averaged",
    ("an embedding with max norm", OURS): "has max_norm: its forward scales the rows",
    ("lbfgs", ZERO): "LBFGS needs all parameters together",
    ("lbfgs", ("zero3",)): "LBFGS needs whole weights",
    # what a rank has of the gradients in stage 2 is its share
    ("clip grad norm of torch", ("zero2",)): "clip with the wrapper's clip_gradients()",
    ("gradients in a buffer of the user", ("zero2",)): "is part of larger memory on rank",
    (
        "no sync after a synchronised backward",
        ("zero2",),
    ): "cannot add to it; set gradients to None first",
    ("loss scaling", ("zero2",)): "GradScaler sees only this rank's gradients",
    # parameters in stage 3 are DTensors
    ("autograd grad of weights", ("zero3",)): "cannot return gradients of sharded weights",
    (
        "autograd grad of weights that have gradients",
        ("zero3",),
    ): "cannot return gradients of sharded weights",
    ("other parameters on a rank and a collective in backward", ("zero3",)): "all ranks must call",
    ("gradients in a buffer of the user", ("zero3",)): "mixed torch.Tensor and DTensor",
    ("another tensor set as data", ("zero3",)): "write weight.data.copy_(new)",
    ("a head loaded in a backward", ("zero3",)): "write sharded weights outside",
    ("a head written in a backward", ("zero3",)): "write sharded weights outside",
    ("a scalar parameter", ("zero3",)): "scale has no dimensions",
    (
        "reentrant checkpointing within blocks",
        ("zero3",),
    ): "was checkpointed with use_reentrant=True",
    ("a weight in two wrapped modules", ("zero3",)): "zero3 has replaced this weight",
    ("a weight that the module has in a list", ("zero3",)): "zero3 has replaced this weight",
    ("an optimizer of before wrapping", ("zero3",)): "zero3 has replaced this weight",
    ("adafactor", ("zero3",)): "Adafactor needs whole weights",
    ("adafactor of vectors", ("zero3",)): "Adafactor needs whole weights",
    ("rprop", ("zero3",)): "in-place operations that require placement changes",
    ("fused sgd", ("zero3",)): "does not have a sharding strategy registered",
    ("called with weights that are computed", ("zero3",)): "only parameters can get gradients",
    ("a backward that fails and counts", ("zero3",)): "zero them before the next",
}


def refusal(name: str, wrapper: str) -> str | None:
    """What a cell of ours says that raises, in part; None for one that does not."""
    for (refused, wrappers), sentence in REFUSALS.items():
        if refused == name and wrapper in wrappers:
            return sentence
    return None


def run(names: list[str], wrappers: list[str]) -> dict[tuple[str, str], tuple[str, str]]:
    """On every rank: what became of each cell, over all ranks, and the words for it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # else each collection looks through all that torch has loaded
    cells: dict[tuple[str, str], tuple[str, str]] = {}
    talk = dist.new_group(timeout=datetime.timedelta(seconds=120))
    group = dist.new_group(timeout=TIMEOUT)
    for name in names:
        expected = _of_one_process(name)
        for wrapper in wrappers:
            found, start = [("", "")] * dist.get_world_size(), time.monotonic()
            dist.all_gather_object(found, _cell(name, wrapper, expected, group), group=talk)
            cells[name, wrapper] = _over_ranks(found)
            if dist.get_rank() == 0 and os.environ.get("CONFORMANCE_LOG"):
                seconds = f"{time.monotonic() - start:.1f} s"
                print(seconds, wrapper, name, *cells[name, wrapper], sep=" | ", flush=True)
            if cells[name, wrapper][0] not in (RIGHT, IDLE):
                gc.collect()
                group = dist.new_group(timeout=TIMEOUT)  # ranks may have parted in the middle
    return cells


def _of_one_process(name):
    """What one process does, or that it raises."""
    try:
        return BEHAVIOURS[name](Setup("none"))
    except Exception as error:
        return error


def _cell(name, wrapper, expected, group) -> tuple[str, str]:
    copies = name in COPIES and wrapper in ("torch-ddp", "torch-zero1")
    try:
        found = BEHAVIOURS[name](Setup(wrapper, None if copies else group))
        if found is None:
            return IDLE, ""
        return _compared(found, expected)
    except Exception as error:
        if isinstance(error, AssertionError) and _is_ours(error):
            return WRONG, str(error)
        words = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        return REFUSED, words


def _is_ours(error: AssertionError) -> bool:
    """Whether a behaviour asserts it, rather than a wrapper."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return raised_in.parent == Path(__file__).parent


def _compared(found, expected) -> tuple[str, str]:
    if isinstance(expected, Exception):
        return WRONG, f"one process raises {expected!r}"
    if list(found) != list(expected):
        return WRONG, f"other names: {sorted(set(found) ^ set(expected))[:3]}"
    for name, value in expected.items():
        tolerance = TOLERANCES.get(value.dtype, 1e-9)
        if not torch.allclose(found[name].to(value.dtype), value, rtol=tolerance, atol=tolerance):
            off = (found[name] - value).abs().max().item() if value.numel() else 0
            return WRONG, f"{name} is off by {off:.2g}"
    return RIGHT, ""


def _over_ranks(found: list[tuple[str, str]]) -> tuple[str, str]:
    """The worst of any rank; of refusals the one that is no rank's waiting for another."""
    for kind in (WRONG, REFUSED, IDLE):
        of_kind = [cell for cell in found if cell[0] == kind]
        if of_kind:
            return min(of_kind, key=lambda cell: any(word in cell[1] for word in WAITS))
    return RIGHT, ""


def _is_in(name, room) -> bool:
    return name.replace(" ", "_") in vars(room)


def main() -> None:
    rooms = {room.__name__.rpartition(".")[2]: room for room in ROOMS}
    asked = [word for word in sys.argv[1:] if word not in WRAPPERS]
    asked += [n for word in asked if word in rooms for n in BEHAVIOURS if _is_in(n, rooms[word])]
    names = [n for n in BEHAVIOURS if not asked or any(word in n for word in asked)]
    wrappers = [w for w in WRAPPERS if w in sys.argv[1:]] or list(WRAPPERS)
    start = time.monotonic()
    cells = launch(run, names, wrappers, ranks=2)[0]
    for (name, wrapper), (kind, words) in cells.items():
        print(f"{wrapper:12} {name}: {kind} {words[:150]}")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
