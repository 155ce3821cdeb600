"""Runs behaviours under wrappers, in one launch of ranks, and rates each cell of the table: right,
refused (it raises), wrong, or not applicable.

`python -m tests.parallel.conformance.table WORDS...` prints the cells of the behaviours, files and
wrappers that match the words, or all.
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
RIGHT, REFUSED, WRONG, IDLE = "right", "refused", "wrong", "not applicable"

# Errors of a rank that waits for another rank which has raised.
WAITS = ("timed out", "Timed out", "timeout", "Connection closed")

TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
# torch's DDP can only be copied and pickled if it uses the default group.
COPIES = (
    "a deep copy as average of weights",
    "a deep copy that is trained",
    "averaged model of torch",
    "pickled",
)
FILES = (gradients, weights, modules, optimizers)
BEHAVIOURS = {
    name.replace("_", " "): function
    for file in FILES
    for name, function in inspect.getmembers(file, inspect.isfunction)
    if function.__module__ == file.__name__ and not name.startswith(("_", "fails"))
}
ZERO = ("zero1", "zero2")
# Cells of this package's wrappers that raise, with a part of the message.
REFUSALS = {
    ("backward with create graph", OURS): "create_graph=True",
    ("a parameter replaced after wrapping", OURS): "wrap the module again",
    ("weights assigned by load state dict", OURS[:-1]): "wrap the module again",
    ("built on the meta device and loaded", OURS[:-1]): "is on the meta device",
    ("built on the meta device and initialised", OURS[:-1]): "is on the meta device",
    ("sparse gradients", OURS): "is sparse; only dense gradients can be averaged",
    ("an embedding with max norm", OURS): "has max_norm: its forward scales the rows",
    ("lbfgs", ZERO): "LBFGS needs all parameters together",
    ("an optimizer that clips in its step", ZERO): "ClippedSGD needs all parameters together",
    ("an optimizer around another", ZERO): "Lookahead needs all parameters together",
    ("lbfgs", ("zero3",)): "LBFGS needs whole weights",
    # Under stage 2 a rank has only the gradients of its own parameters.
    ("clip grad norm of torch", ("zero2",)): "clip with the wrapper's clip_gradients()",
    ("gradients in a buffer of the user", ("zero2",)): "is part of larger memory on rank",
    (
        "no sync after a synchronised backward",
        ("zero2",),
    ): "cannot add to it; set gradients to None first",
    ("loss scaling", ("zero2",)): "GradScaler sees only this rank's gradients",
    # Under stage 3 parameters are DTensors.
    ("autograd grad of weights", ("zero3",)): "cannot return gradients of sharded weights",
    (
        "autograd grad of weights that have gradients",
        ("zero3",),
    ): "cannot return gradients of sharded weights",
    (
        "different parameters per rank and a collective in backward",
        ("zero3",),
    ): "all ranks must call",
    ("gradients in a buffer of the user", ("zero3",)): "mixed torch.Tensor and DTensor",
    ("weight data set to another tensor", ("zero3",)): "write weight.data.copy_(new)",
    ("head weights loaded in a backward", ("zero3",)): "write sharded weights outside",
    ("head weights written in a backward", ("zero3",)): "write sharded weights outside",
    ("a scalar parameter", ("zero3",)): "scale has no dimensions",
    (
        "reentrant checkpointing within blocks",
        ("zero3",),
    ): "was checkpointed with use_reentrant=True",
    ("a weight in two wrapped modules", ("zero3",)): "zero3 has replaced this weight",
    ("a weight that the module keeps in a list", ("zero3",)): "zero3 has replaced this weight",
    ("an optimizer built before wrapping", ("zero3",)): "zero3 has replaced this weight",
    ("adafactor", ("zero3",)): "Adafactor needs whole weights",
    ("adafactor of vectors", ("zero3",)): "Adafactor needs whole weights",
    ("rprop", ("zero3",)): "aten.index_put_.default",
    ("fused sgd", ("zero3",)): "does not have a sharding strategy registered",
    ("functional call with computed weights", ("zero3",)): "only parameters can get gradients",
    ("a failed backward whose gradients are used", ("zero3",)): "zero them before the next",
}


def refusal(name: str, wrapper: str) -> str | None:
    """Returns a part of the message that a cell must raise; None if it must not raise."""
    for (refused, wrappers), message in REFUSALS.items():
        if refused == name and wrapper in wrappers:
            return message
    return None


def run(names: list[str], wrappers: list[str]) -> dict[tuple[str, str], tuple[str, str]]:
    """Runs cells, on every rank; returns the rating of each over all ranks, with its message."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # garbage collections then skip the objects that torch has loaded
    cells: dict[tuple[str, str], tuple[str, str]] = {}
    results_group = dist.new_group(timeout=datetime.timedelta(seconds=120))
    group = dist.new_group(timeout=TIMEOUT)
    for name in names:
        expected = _in_one_process(name)
        for wrapper in wrappers:
            of_ranks, start = [("", "")] * dist.get_world_size(), time.monotonic()
            dist.all_gather_object(
                of_ranks, _cell(name, wrapper, expected, group), group=results_group
            )
            cells[name, wrapper] = _over_ranks(of_ranks)
            if dist.get_rank() == 0 and os.environ.get("CONFORMANCE_LOG"):
                seconds = f"{time.monotonic() - start:.1f} s"
                print(seconds, wrapper, name, *cells[name, wrapper], sep=" | ", flush=True)
            if cells[name, wrapper][0] not in (RIGHT, IDLE):
                gc.collect()
                group = dist.new_group(
                    timeout=TIMEOUT
                )  # a rank may have left the old one in mid-collective
    return cells


def _in_one_process(name):
    """Returns the results of one process, or the exception that it raises."""
    try:
        return BEHAVIOURS[name](Setup("none"))
    except Exception as error:
        return error


def _cell(name, wrapper, expected, group) -> tuple[str, str]:
    copies = name in COPIES and wrapper in ("torch-ddp", "torch-zero1")
    try:
        results = BEHAVIOURS[name](Setup(wrapper, None if copies else group))
        if results is None:
            return IDLE, ""
        return _compared(results, expected)
    except Exception as error:
        if isinstance(error, AssertionError) and _is_raised_here(error):
            return WRONG, str(error)
        message = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        return REFUSED, message


def _is_raised_here(error: AssertionError) -> bool:
    """Returns True if a behaviour raised it, and False if a wrapper did."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return raised_in.parent == Path(__file__).parent


def _compared(results, expected) -> tuple[str, str]:
    if isinstance(expected, Exception):
        return WRONG, f"one process raises {expected!r}"
    if list(results) != list(expected):
        return WRONG, f"different names: {sorted(set(results) ^ set(expected))[:3]}"
    for name, value in expected.items():
        tolerance = TOLERANCES.get(value.dtype, 1e-9)
        if not torch.allclose(results[name].to(value.dtype), value, rtol=tolerance, atol=tolerance):
            off = (results[name] - value).abs().max().item() if value.numel() else 0
            return WRONG, f"{name} is off by {off:.2g}"
    return RIGHT, ""


def _over_ranks(cells: list[tuple[str, str]]) -> tuple[str, str]:
    """Returns the worst rating of any rank. Among refusals it prefers one that is not the error of a
    rank that waits for another.
    """
    for kind in (WRONG, REFUSED, IDLE):
        of_kind = [cell for cell in cells if cell[0] == kind]
        if of_kind:
            return min(of_kind, key=lambda cell: any(word in cell[1] for word in WAITS))
    return RIGHT, ""


def _is_in(name, file) -> bool:
    return name.replace(" ", "_") in vars(file)


def main() -> None:
    files = {file.__name__.rpartition(".")[2]: file for file in FILES}
    words = [word for word in sys.argv[1:] if word not in WRAPPERS]
    words += [n for word in words if word in files for n in BEHAVIOURS if _is_in(n, files[word])]
    names = [n for n in BEHAVIOURS if not words or any(word in n for word in words)]
    wrappers = [w for w in WRAPPERS if w in sys.argv[1:]] or list(WRAPPERS)
    start = time.monotonic()
    cells = launch(run, names, wrappers, ranks=2)[0]
    for (name, wrapper), (kind, message) in cells.items():
        print(f"{wrapper:12} {name}: {kind} {message[:150]}")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
