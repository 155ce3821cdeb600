"""A module at hand measured in this process, by the functions that the commands run.

Everywhere `module` is an nn.Module with its `batch`, or a function that takes nothing and returns
what a factory of --model returns: (module, batch), (module, batch, loss) or a dict. A module is
copied first, so that its weights stay; a function is called on the device, and on tensors without
memory where memory is predicted.
"""

import contextlib
import copy
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stepgauge.api.runs import without_main
from stepgauge.api.show import Result
from stepgauge.bench import memory, profile
from stepgauge.bench import step as bench_step
from stepgauge.bench.sweep import stamped
from stepgauge.measure.devices import resolve
from stepgauge.report.memory import memory_tables
from stepgauge.report.profile import tables as profile_tables
from stepgauge.report.profile_page import folder_of
from stepgauge.report.profile_page import read as read_profile
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.memory import PREDICTIONS, MemorySpec
from stepgauge.spec.profile import ProfileSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.train.user_model import empty_like, in_memory, without_values

Model = nn.Module | Callable[[], Any]
Optimizer = str | Callable[..., torch.optim.Optimizer]
PREDICTED_ON = PREDICTIONS[1:]  # without "no"


def time_step(
    module: Model,
    batch: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Optimizer = "adamw",
    precision: str = "fp32",
    compile: str = "off",
    phases: str = "step",
    device: str = "auto",
    warmup: int = 5,
    steps: int = 10,
    seconds: float = 1.0,
) -> Result:
    """Times forward, backward, optimizer and the whole step, in ms.

    batch      module(*tuple), module(**mapping) or module(tensor); with `loss` (inputs, targets)
    loss       loss(output, targets); without it the output says the loss, as docs/api.md tells
    optimizer  a name of --optimizer, or a function of the parameters
    phases     "forward" alone, "backward" with its forward, or the whole "step"
    steps      timed steps, at least, and for `seconds` at least, after `warmup` untimed ones

    Raises ValueError for what is no model or no such option, and what torch raises.
    """
    counts = {"warmup": warmup, "steps": steps, "seconds": seconds, "phases": phases}
    asked = {"precision": precision, "compile": compile, **counts}
    with _asked(StepSpec, module, batch, loss, optimizer, device, asked) as spec:
        return Result(stamped(bench_step.run(spec)))


def profile_step(
    module: Model,
    batch: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Optimizer = "adamw",
    precision: str = "fp32",
    compile: str = "off",
    device: str = "auto",
    active: int = 3,
    folder: str | Path | None = None,
) -> Result:
    """Where the time of a step goes: kernels by kind, phase and part of the model, idle time.

    The result's `folder` has the Chrome trace and the analysis; `active` steps are
    recorded. Arguments and errors as time_step's.
    """
    run = Path(folder or tempfile.mkdtemp(prefix="stepgauge-profile-"))
    asked = {"precision": precision, "compile": compile, "active": active}
    with _asked(ProfileSpec, module, batch, loss, optimizer, device, asked) as spec:
        record = stamped(profile.run(spec, folder=run))
    found = read_profile(record, run)
    assert found is not None, "the analysis was just written"
    shown = [table for table in profile_tables(found) if table.rows]
    return Result(record, folder=folder_of(record, run), details=shown)


def profile_memory(
    module: Model,
    batch: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Optimizer = "adamw",
    precision: str = "fp32",
    device: str = "auto",
) -> Result:
    """Who holds memory when in a step, and `prediction` beside it. Arguments and errors as
    time_step's.

    On CUDA take a fresh process: what an earlier step has left would be part of the figures.
    """
    asked = {"precision": precision}
    with _asked(MemorySpec, module, batch, loss, optimizer, device, asked) as spec:
        prediction = stamped(memory.predicted(spec))
        record = stamped(memory.measure(spec))
    return Result(record, prediction=prediction, details=memory_tables(record))


def predict_memory(
    module: Model,
    batch: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Optimizer = "adamw",
    precision: str = "fp32",
    on: str = "sm90",
) -> Result:
    """The memory of a step, on tensors without memory, for a device that need not be there.

    on  sm80 is an A100, sm90 an H100, cpu this machine. Other arguments as time_step's.

    Autograd learns at a process's first backward which devices there are, so that a GPU is pretended
    in a process of its own. What cannot be sent there, such as a class of a notebook, is predicted
    here; raises RuntimeError where this process had a backward before.
    """
    if on not in PREDICTED_ON:
        raise ValueError(f"on is {on!r}; choose one of {', '.join(PREDICTED_ON)}")
    arguments = (module, batch, loss, optimizer, precision, on)
    if on != "cpu" and _can_be_sent(arguments):
        with without_main():
            record = run_isolated(_predicted, *arguments)
    else:
        try:
            record = _predicted(*arguments)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise RuntimeError(
                "this process had a backward before: call predict_memory first, or define the "
                "model in a file that can be imported"
            ) from None
    return Result(record, details=memory_tables(record))


def _predicted(
    module: Model, batch: Any, loss: Any, optimizer: Optimizer, precision: str, on: str
) -> Record:
    asked = {"precision": precision, "predict": on}
    with _asked(MemorySpec, module, batch, loss, optimizer, "cpu", asked) as spec:
        return stamped(memory.predicted(spec))


def _can_be_sent(values: Any) -> bool:
    """Whether another process can read the values: what __main__ defines it cannot."""
    try:
        return b"__main__" not in pickle.dumps(values)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


@contextlib.contextmanager
def _asked(
    declared: type,
    module: Model,
    batch: Any,
    loss: Callable[..., Any] | None,
    optimizer: Optimizer,
    device: str,
    fields: Mapping[str, Any],
) -> Iterator[Any]:
    """The spec of the module; its model can be built while the block runs."""
    own = None if isinstance(optimizer, str) else optimizer
    if isinstance(module, nn.Module):
        factory = _factory_of(module, batch, loss, own)
        name = type(module).__name__
    else:
        if isinstance(module, type) or not callable(module):
            raise ValueError(
                f"module is {module!r}; give an nn.Module, or a function that returns one with a "
                "batch"
            )
        if batch is not None or loss is not None or own is not None:
            raise ValueError("a function brings its batch, loss and optimizer: leave them out")
        factory, name = module, getattr(module, "__name__", "factory")
    with in_memory(factory, name) as model:
        chosen = {"optimizer": optimizer} if isinstance(optimizer, str) else {}
        yield declared(model=model, device=str(resolve(device)), **chosen, **fields)


def _factory_of(
    module: nn.Module, batch: Any, loss: Callable[..., Any] | None, optimizer: Any
) -> Callable[[], Any]:
    """What builds a copy of the module: of a real one, or without memory of its sizes."""

    def factory() -> dict[str, Any]:
        if _has_memory():
            parts = {"module": copy.deepcopy(module), "batch": batch}
        else:
            empty = tree_map_only(Tensor, empty_like, _plain(batch))
            parts = {"module": without_values(module), "batch": empty}
        return {**parts, "loss": loss, "optimizer": optimizer}

    return factory


def _has_memory() -> bool:
    return type(torch.empty(0)) is Tensor


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch
