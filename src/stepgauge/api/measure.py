"""Measures a module in this process, with the functions that the commands use.

In all functions, `module` is an nn.Module that is called with `batch`, or a function without
arguments that returns what a factory of --model returns: (module, batch), (module, batch, loss) or a
dict. A module is copied first, so that its weights do not change. A function is called on the
device, or with fake tensors to predict memory.
"""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stepgauge.api.show import Result
from stepgauge.bench import memory, profile
from stepgauge.bench import step as bench_step
from stepgauge.bench.sweep import stamped
from stepgauge.measure.devices import resolve
from stepgauge.report.memory import memory_tables
from stepgauge.report.profile import tables as profile_tables
from stepgauge.report.profile_page import folder_of
from stepgauge.report.profile_page import read as read_profile
from stepgauge.spec.memory import PREDICTIONS, MemorySpec
from stepgauge.spec.profile import ProfileSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore
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

    batch      module(*tuple), module(**mapping) or module(tensor); with a loss (inputs, targets)
    loss       loss(output, targets); without it the module's output is the loss (docs/api.md)
    optimizer  a name of --optimizer, or a function of the parameters
    phases     "forward" without gradients, "backward" with its forward, or the whole "step"
    steps      at least this many timed steps, for at least `seconds`, after `warmup` untimed steps

    Raises ValueError for an unsuitable model or an unknown option, and whatever torch raises.
    """
    counts = {"warmup": warmup, "steps": steps, "seconds": seconds, "phases": phases}
    fields = {"precision": precision, "compile": compile, **counts}
    with _spec(StepSpec, module, batch, loss, optimizer, device, fields) as spec:
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
    """Profiles a step: kernels by kind, phase and part of the model, idle time.

    active  recorded steps
    folder  the run folder; the Chrome trace and the analysis are in the result's `folder`

    Other arguments and errors are those of time_step. Raises StoreError if the folder cannot be
    written.
    """
    run = Path(folder or tempfile.mkdtemp(prefix="stepgauge-profile-"))
    RunStore(run).require_possible()
    fields = {"precision": precision, "compile": compile, "active": active}
    with _spec(ProfileSpec, module, batch, loss, optimizer, device, fields) as spec:
        record = stamped(profile.run(spec, folder=run))
    analysis = read_profile(record, run)
    assert analysis is not None, "the analysis was just written"
    tables = [table for table in profile_tables(analysis) if table.rows]
    return Result(record, folder=folder_of(record, run), details=tables)


def profile_memory(
    module: Model,
    batch: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Optimizer = "adamw",
    precision: str = "fp32",
    device: str = "auto",
) -> Result:
    """Measures what uses memory during a step, and predicts it: the result's `prediction`.

    Use a new process on CUDA, because memory left by an earlier step would be included. Arguments
    and errors are those of time_step.
    """
    fields = {"precision": precision}
    with _spec(MemorySpec, module, batch, loss, optimizer, device, fields) as spec:
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
    """Predicts the memory of a step on fake tensors, for a device that this machine need not have.

    on  sm80 (A100), sm90 (H100, H200) or cpu (this machine). Other arguments are those of time_step

    Raises ValueError for an unknown device, and for a GPU if this machine has neither a GPU nor a C++
    compiler.
    """
    if on not in PREDICTED_ON:
        raise ValueError(f"on is {on!r}; choose one of {', '.join(PREDICTED_ON)}")
    fields = {"precision": precision, "predict": on}
    with _spec(MemorySpec, module, batch, loss, optimizer, "cpu", fields) as spec:
        record = stamped(memory.predicted(spec))
    return Result(record, details=memory_tables(record))


@contextlib.contextmanager
def _spec(
    spec_type: type,
    module: Model,
    batch: Any,
    loss: Callable[..., Any] | None,
    optimizer: Optimizer,
    device: str,
    fields: Mapping[str, Any],
) -> Iterator[Any]:
    """Yields the spec of a module, whose model can be built while the block runs. The block seeds and
    draws; the caller's random state is restored afterwards.
    """
    own_optimizer = None if isinstance(optimizer, str) else optimizer
    if isinstance(module, nn.Module):
        if batch is None:
            raise ValueError(f"batch is None; give a batch for {type(module).__name__}")
        factory = _factory_of(module, batch, loss, own_optimizer)
        name = type(module).__name__
    else:
        if isinstance(module, type) or not callable(module):
            raise ValueError(
                f"module is a {type(module).__name__}; give an nn.Module, or a function that "
                "returns one with a batch"
            )
        if batch is not None or loss is not None or own_optimizer is not None:
            raise ValueError(
                "module is a function, which returns its batch, loss and optimizer: leave them out"
            )
        factory, name = module, getattr(module, "__name__", "factory")
    chosen = {"optimizer": optimizer} if isinstance(optimizer, str) else {}
    found = resolve(device)
    with in_memory(factory, name) as model, _kept_random_state(found):
        yield spec_type(model=model, device=str(found), **chosen, **fields)


def _kept_random_state(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restores the random state of the host and, if they are in use, of all GPUs, which
    torch.manual_seed seeds together.
    """
    uses_gpus = device.type == "cuda" or torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if uses_gpus else ()
    return torch.random.fork_rng(devices, device_type="cuda")


def _factory_of(
    module: nn.Module, batch: Any, loss: Callable[..., Any] | None, optimizer: Any
) -> Callable[[], Any]:
    """Returns a factory that copies the module; under fake tensors the copy has no values."""

    def factory() -> dict[str, Any]:
        if type(torch.empty(0)) is Tensor:  # not a fake tensor
            parts = {"module": copy.deepcopy(module), "batch": batch}
        else:
            plain = dict(batch) if isinstance(batch, Mapping) else batch  # which tree_map can enter
            parts = {
                "module": without_values(module),
                "batch": tree_map_only(Tensor, empty_like, plain),
            }
        return {**parts, "loss": loss, "optimizer": optimizer}

    return factory
