"""Builds a training step from a user's network, for all measurements.

The user's factory takes no arguments and returns (module, batch), (module, batch, loss), or a
mapping with `module` and

    batch      the module's arguments: module(*tuple), module(**mapping) or module(tensor)
    batches    instead of `batch`, a function of 0, 1, ... that returns a batch for each step and rank
    held_out   a list of batches whose mean loss `train` reports
    loss       loss(output, targets) for a batch (inputs, targets); loss(output, batch) for a mapping;
               a mean over samples, since losses of micro-batches and ranks are averaged equally
    optimizer  optimizer(parameters), a class of torch.optim or a partial of one
    table      tensor parallel rules (spec/plan/tensor.py); default: those of a transformers config

Without `loss` the loss is taken from the module's output: a scalar, its `.loss` or ["loss"], or the
mean of its first floating-point tensor.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure, tree_unflatten

from stepgauge.models.parts import build_optimizer
from stepgauge.models.transformer import compiled
from stepgauge.parallel.training import Groups, Parallelise, single_process
from stepgauge.runtime.load_file import load_file, own_names
from stepgauge.spec.plan.tensor import Rule, Table
from stepgauge.spec.user_model import UserModel
from stepgauge.train.failing_module import explained_without_loss, named_module
from stepgauge.train.precision import Precision, precision_on
from stepgauge.train.step import TrainingStep

PARTS = ("module", "batch", "loss", "batches", "held_out", "optimizer", "table")
FUNCTIONS = {  # the parts that must be functions, with the end of the message about others
    "batches": " of 0, 1, ... that returns the batch of that number",
    "loss": "",
    "optimizer": " of the parameters, such as torch.optim.SGD",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserParts:
    """The parts that a user's factory returned."""

    module: nn.Module
    batches: Callable[[int], Any]
    is_one_batch: bool = False  # `batches` returns the same one for every number
    held_out: list[Any] | None = None
    loss: Callable[..., Any] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    table: Table | None = None

    @classmethod
    def of(cls, made: Any, where: str) -> "UserParts":
        """Reads the value returned by the factory at `where`. Raises ValueError for a wrong one."""
        if isinstance(made, tuple) and 2 <= len(made) <= 3:
            made = dict(zip(PARTS, made, strict=False))
        if not isinstance(made, Mapping):
            raise ValueError(
                f"{where} returned {type(made).__name__}; it must return (module, batch), "
                f"(module, batch, loss) or a dict of {', '.join(PARTS)}"
            )
        given = dict(made)
        if unknown := [name for name in given if name not in PARTS]:
            raise ValueError(
                f"{where} returned a dict with {unknown[0]!r}; it may have {', '.join(PARTS)}"
            )
        if not isinstance(module := given.get("module"), nn.Module):
            raise ValueError(
                f"{where} returned module of type {type(module).__name__}; it must be an nn.Module"
            )
        if not given.keys() & {"batch", "batches"}:
            raise ValueError(f"{where} returned a dict without a 'batch' or 'batches'")
        batch = given.pop("batch", None)
        if "batches" not in given:
            given |= {"batches": lambda number: batch, "is_one_batch": True}
        for name in ("batches", "loss", "optimizer"):
            if given.get(name) is not None and not callable(given[name]):
                raise ValueError(
                    f"{where} returned {name} of type {type(given[name]).__name__}; it must be a "
                    f"function{FUNCTIONS[name]}"
                )
        if given.get("held_out") is not None and not isinstance(given["held_out"], list):
            raise ValueError(
                f"{where} returned held_out {type(given['held_out']).__name__}; it must be a list "
                "of batches"
            )
        if (table := given.get("table")) is not None and not _is_table(table):
            raise ValueError(
                f"{where} returned a table that is not a dict of names and rules; see "
                "docs/tensor-parallel.md"
            )
        return cls(**given)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(rule, Rule) for name, rule in value.items()
    )


class UserStep(NamedTuple):
    """A user's training step with its batches.

    arguments_of    turns a batch into the arguments of step.forward, on the device
    num_parameters  of the whole network
    """

    step: TrainingStep
    arguments_of: Callable[[Any], tuple[Any]]
    batches: Callable[[int], Any]
    num_parameters: int

    def arguments(self, number: int) -> tuple[Any]:
        """Returns the arguments of step.forward for the batch of that number."""
        return self.arguments_of(self.batches(number))


# Factories passed in Python instead of in a file, while in_memory's block runs.
_IN_MEMORY: dict[UserModel, Callable[[], Any]] = {}


@contextlib.contextmanager
def in_memory(factory: Callable[[], Any], name: str) -> Iterator[UserModel]:
    """Yields a model that `factory` builds, usable in this process while the block runs."""
    model = UserModel(file="", factory=name, content="")
    _IN_MEMORY[model] = factory
    try:
        yield model
    finally:
        del _IN_MEMORY[model]


def load_factory(model: UserModel) -> Callable[[], Any]:
    """Returns the model's factory. Raises ValueError if the file has no such function."""
    if model in _IN_MEMORY:
        return _IN_MEMORY[model]
    module = load_file(Path(model.file))
    factory = getattr(module, model.factory, None)
    if not callable(factory):
        own = ", ".join(own_names(module)) or "none"
        raise ValueError(f"{model.file} has no function {model.factory!r}; it has {own}")
    return factory


def problem_of(model: UserModel) -> str | None:
    """Returns why the model's file cannot be used, or None."""
    try:
        load_factory(model)
    except ValueError as error:
        return str(error)
    return None


def build_parts(spec: Any, device: torch.device) -> UserParts:
    """Calls the factory of the spec's UserModel with the device as torch's default, and returns its
    parts. Raises ValueError if it returns anything else.
    """
    factory = load_factory(spec.model)
    torch.manual_seed(spec.seed)
    with device:
        return UserParts.of(factory(), f"{spec.model.file}:{spec.model.factory}".lstrip(":"))


# Returns the function that distributes a user's network, given its factory's parts.
SpreadParts = Callable[[UserParts], Parallelise]


def in_one_process(parts: UserParts) -> Parallelise:
    """Leaves the whole network in one process."""
    return single_process


def build_user_step(
    spec: Any, device: torch.device, *, spread: SpreadParts = in_one_process, lr: float
) -> UserStep:
    """Returns the training step of a spec whose model is a UserModel.

    Raises ValueError if its factory returns anything else than the parts, and for a precision that
    the device does not support.
    """
    parts = build_parts(spec, device)
    return step_of_parts(
        parts,
        device,
        precision=spec.precision,
        optimizer=spec.optimizer,
        compile=spec.compile,
        parallelise=spread(parts),
        lr=lr,
    )


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Returns the module on the device. A module on the meta device is accepted only while memory is
    predicted on fake tensors; otherwise it has no values, and ValueError is raised.
    """
    if all(held.device.type != "meta" for held in (*module.parameters(), *module.buffers())):
        return module.to(device)
    if type(torch.empty(0)) is Tensor:
        raise ValueError(
            f"{type(module).__name__} is on the meta device and has no values, which a step needs "
            "(only memory can be predicted without)"
        )
    return without_values(module, device)


def without_values(module: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Returns a copy of the module with empty tensors of the same sizes, on the device or torch's
    default device, for fake tensors. The copy shares generators, because nothing draws from them.
    """
    held = (leaf for part in module.modules() for leaf in tree_leaves(vars(part)))
    memo = {id(x): empty_like(x, device) for x in held if isinstance(x, Tensor | torch.Generator)}
    return copy.deepcopy(module, memo)


def empty_like(value: Any, device: torch.device | None = None) -> Any:
    """Returns an empty tensor or parameter of the same size; other values are returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    empty = torch.empty(value.shape, dtype=value.dtype, device=device)
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty


def step_of_parts(
    parts: UserParts,
    device: torch.device,
    *,
    precision: str = "fp32",
    optimizer: str = "adamw",
    compile: str = "off",
    parallelise: Parallelise = single_process,
    max_gradient_norm: float | None = None,
    groups: Groups | None = None,
    **settings: Any,
) -> UserStep:
    """Returns the training step of a factory's parts. `groups` and `settings` apply to the named
    `optimizer`, not to one that the parts bring. Raises ValueError as build_user_step does.
    """
    chosen = precision_on(precision, device)
    own_types = {parameter.dtype for parameter in parts.module.parameters()}
    module = chosen.of(moved(parts.module, device))
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no trainable parameters")
    parameters = sum(parameter.numel() for parameter in module.parameters())
    make = _optimizer_class(parts, optimizer, chosen, **settings)
    grouped = trained_group if parts.optimizer or groups is None else groups
    parallel = parallelise(compiled(module, compile), grouped, make)  # type: ignore[arg-type]
    loss = parts.loss  # not parts in the lambda below, which would keep all of a pipeline's stages
    step = TrainingStep(
        parallel.module,
        parallel.optimizer,
        chosen,
        device,
        max_gradient_norm=max_gradient_norm,
        compute_loss=lambda batch: loss_of(parallel.module, batch, loss),
        parallel=parallel,
        brings_optimizer=parts.optimizer is not None,
    )
    put = functools.partial(_on_device, device=device, dtype=chosen.parameters, own_types=own_types)
    return UserStep(step, lambda batch: (put(batch),), parts.batches, parameters)


def _optimizer_class(
    parts: UserParts, optimizer: str, precision: Precision, **settings: Any
) -> Any:
    """Returns the function that builds the optimizer: the one that the user's model brings, or the
    named one. Raises ValueError if the model brings one and another is requested.
    """
    if parts.optimizer is None:
        masters = precision.master_weights
        return functools.partial(build_optimizer, optimizer, master_weights=masters, **settings)
    if optimizer != "adamw":
        raise ValueError(f"optimizer is {optimizer!r}; the user's model brings its own optimizer")
    if precision.master_weights:
        raise ValueError(
            "the user's model brings an optimizer; bf16-master needs --optimizer fused"
        )
    return functools.partial(_of_parameters, parts.optimizer)


def trained_group(module: nn.Module) -> list[dict[str, Any]]:
    """Returns the trainable parameters as one group."""
    return [{"params": [p for p in module.parameters() if p.requires_grad]}]


def _of_parameters(make: Callable[..., Any], groups: Iterable[Any]) -> torch.optim.Optimizer:
    """Calls the user's function with a plain list of parameters, which it may group itself."""
    grouped = [group["params"] if isinstance(group, dict) else [group] for group in groups]
    made = make([parameter for group in grouped for parameter in group])
    if not hasattr(made, "step"):
        raise ValueError(
            f"the optimizer function returned {type(made).__name__}; it must return an optimizer"
        )
    return made


def _on_device(
    batch: Any, device: torch.device, dtype: torch.dtype, own_types: set[torch.dtype]
) -> Any:
    """Returns the batch with its tensors on the device. Floating-point tensors are converted to
    `dtype` if it is not fp32, or if they had one of the network's original types (`own_types`).
    """
    batch = dict(batch) if isinstance(batch, Mapping) else batch

    def convert(tensor: Tensor) -> Tensor:
        follows = dtype != torch.float32 or tensor.dtype in own_types
        return tensor.to(device, dtype if follows and tensor.is_floating_point() else None)

    return tree_map_only(Tensor, convert, batch)


def in_type(batch: Any, dtype: torch.dtype) -> Any:
    """Returns the batch with its floating-point tensors converted to a type."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def loss_of(module: Callable[..., Any], batch: Any, loss: Callable[..., Any] | None) -> Tensor:
    """Returns the loss of a batch, from the user's loss function or else the module's output."""
    if loss is None:
        with explained_without_loss(batch):
            return scalar_loss(_called(module, batch))
    if isinstance(batch, Mapping):
        return required_scalar(loss(_called(module, batch), batch))
    inputs, targets = inputs_and_targets(batch)
    return required_scalar(loss(_called(module, inputs), targets))


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Splits a batch for a network with a loss function. Raises ValueError if it is no pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError("with a loss function the batch must be a pair (inputs, targets)")
    return batch[0], batch[1]


def _called(module: Callable[..., Any], inputs: Any) -> Any:
    with named_module(module):
        if isinstance(inputs, Mapping):
            return module(**inputs)
        return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def tensors_of(batch: Any, *, has_loss: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors of inputs and targets. Raises ValueError if the batch has other values."""
    inputs, targets = inputs_and_targets(batch) if has_loss else (batch, ())
    tensors = leaves_of(inputs), leaves_of(targets)
    if others := [leaf for leaves in tensors for leaf in leaves if not isinstance(leaf, Tensor)]:
        raise ValueError(
            f"the batch contains {type(others[0]).__name__}; a pipeline can only split tensors"
        )
    return tensors


def leaves_of(batch: Any) -> list[Any]:
    """Returns the values in a batch's tuples, lists and mappings."""
    return tree_leaves(batch)


def with_leaves(batch: Any, leaves: Sequence[Any]) -> Any:
    """Returns the batch's structure with other values."""
    return tree_unflatten(leaves, tree_structure(batch))


def required_scalar(loss: Any) -> Tensor:
    """Returns what a user's loss function returned. Raises ValueError for a number, and for a tensor
    of several elements, which is not averaged silently.
    """
    if isinstance(loss, int | float):
        raise ValueError(f"the loss function returned {type(loss).__name__}, not a tensor")
    if isinstance(loss, Tensor) and loss.numel() != 1:
        shape = " × ".join(map(str, loss.shape))
        raise ValueError(
            f"the loss function returned a tensor of shape {shape}; it must return a scalar, such as "
            "the tensor's mean()"
        )
    return scalar_loss(loss)


def scalar_loss(output: Any) -> Tensor:
    """Returns the loss in a module's output: a scalar, its `loss`, or the mean of its first
    floating-point tensor. Raises ValueError for an output without one.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        output = loss
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        raise ValueError(
            f"the model returned {type(output).__name__}, without a floating-point tensor"
        )
    return floating[0] if floating[0].ndim == 0 else floating[0].float().mean()
