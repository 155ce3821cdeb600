"""A user's network as a training step that every measurement takes.

The factory takes no arguments and returns (module, batch), (module, batch, loss), or a mapping with
`module` and

    batch      what the module is called with: module(*tuple), module(**mapping) or module(tensor)
    batches    in place of it a function of 0, 1, ... that gives a batch for each step and rank
    held_out   a list of batches whose mean loss `train` follows
    loss       loss(output, targets) of a batch (inputs, targets); of a mapping, loss(output, batch)
    optimizer  optimizer(parameters), a class of torch.optim or a partial of one
    table      names and rules by which tensor parallel cuts the module (spec/plan/tensor.py); without
               it that of a transformers config

Without `loss` the module's output says it: a scalar, its `.loss` or ["loss"], or the mean of its
first floating-point tensor.
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
from stepgauge.train.failing_module import named_module
from stepgauge.train.precision import Precision, precision_on
from stepgauge.train.step import TrainingStep

PARTS = ("module", "batch", "loss", "batches", "held_out", "optimizer", "table")
FUNCTIONS = {
    "batches": " of 0, 1, ... that gives the batch of that number",
    "loss": "",
    "optimizer": " of the parameters, such as torch.optim.SGD",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserParts:
    """What the factory gives."""

    module: nn.Module
    batches: Callable[[int], Any]
    held_out: list[Any] | None = None
    loss: Callable[..., Any] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    table: Table | None = None

    @classmethod
    def of(cls, made: Any, where: str) -> "UserParts":
        """Raises ValueError for something else than the parts."""
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
        if not isinstance(given.get("module"), nn.Module):
            raise ValueError(
                f"{where} returned module of type {type(given.get('module')).__name__}; it must be "
                f"an nn.Module"
            )
        if not given.keys() & {"batch", "batches"}:
            raise ValueError(f"{where} returned a dict without a 'batch' or 'batches'")
        batch = given.pop("batch", None)
        given.setdefault("batches", lambda number: batch)
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
                f"{where} returned a table that is no dict of names and rules; "
                "docs/tensor-parallel.md shows one"
            )
        return cls(**given)


def _is_table(given: Any) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(name, str) and isinstance(rule, Rule) for name, rule in given.items()
    )


class UserStep(NamedTuple):
    """The step, what makes its arguments of a batch, and how many parameters the whole network
    has.
    """

    step: TrainingStep
    arguments_of: Callable[[Any], tuple[Any]]
    batches: Callable[[int], Any]
    num_parameters: int

    def arguments(self, number: int) -> tuple[Any]:
        """Of the batch of that number."""
        return self.arguments_of(self.batches(number))


# Functions that were given in Python and stand in no file, while in_memory's block runs.
_GIVEN: dict[UserModel, Callable[[], Any]] = {}


@contextlib.contextmanager
def in_memory(factory: Callable[[], Any], name: str) -> Iterator[UserModel]:
    """A model that `factory` builds in this process while the block runs."""
    model = UserModel(file="", factory=name, content="")
    _GIVEN[model] = factory
    try:
        yield model
    finally:
        del _GIVEN[model]


def load_factory(model: UserModel) -> Callable[[], Any]:
    """The function that builds the network. Raises ValueError if the file has no such function."""
    if model in _GIVEN:
        return _GIVEN[model]
    module = load_file(Path(model.file))
    factory = getattr(module, model.factory, None)
    if not callable(factory):
        own = ", ".join(own_names(module)) or "none"
        raise ValueError(f"{model.file} has no function {model.factory!r}; it has {own}")
    return factory


def problem_of(model: UserModel) -> str | None:
    """Why the file cannot serve, or None."""
    try:
        load_factory(model)
    except ValueError as error:
        return str(error)
    return None


def build_parts(spec: Any, device: torch.device) -> UserParts:
    """What the factory of the spec's UserModel gives, its tensors on the device.

    Raises ValueError for something else.
    """
    factory = load_factory(spec.model)
    torch.manual_seed(spec.seed)
    with device:
        return UserParts.of(factory(), f"{spec.model.file}:{spec.model.factory}".lstrip(":"))


# How a user's network is spread, by what its factory gave.
SpreadParts = Callable[[UserParts], Parallelise]


def alone(parts: UserParts) -> Parallelise:
    """One process with the whole network."""
    return single_process


def build_user_step(
    spec: Any, device: torch.device, *, spread: SpreadParts = alone, lr: float
) -> UserStep:
    """The step of a spec whose model is a UserModel.

    Raises ValueError for a factory that gives something else, and for a precision that the device
    does not have.
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
    """The module on the device. Of one on the meta device a prediction needs no values; where there
    are any, it raises ValueError.
    """
    held = (*module.parameters(), *module.buffers())
    if not any(tensor.device.type == "meta" for tensor in held):
        return module.to(device)
    if type(torch.empty(0)) is Tensor:
        raise ValueError(
            f"{type(module).__name__} is on the meta device and has no values; a step needs some "
            "(its memory is predicted without)"
        )
    return without_values(module, device)


def without_values(module: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A copy whose tensors have the sizes of the module's and lie on the device, or on the default
    one: for where tensors have no memory. A generator stays: nothing is drawn from it there.
    """
    held = (leaf for part in module.modules() for leaf in tree_leaves(vars(part)))
    memo = {id(x): empty_like(x, device) for x in held if isinstance(x, Tensor | torch.Generator)}
    return copy.deepcopy(module, memo)


def empty_like(value: Any, device: torch.device | None = None) -> Any:
    """A tensor of that size, a parameter of a parameter; what is no tensor as it is."""
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
    """The step of a module with its batches; `groups` and `settings` are those of an optimizer of
    ours. Raises ValueError as build_user_step does.
    """
    chosen = precision_on(precision, device)
    own_types = {parameter.dtype for parameter in parts.module.parameters()}
    module = chosen.of(moved(parts.module, device))
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameters that are trained")
    parameters = sum(parameter.numel() for parameter in module.parameters())
    make = _optimizer_class(parts, optimizer, chosen, **settings)
    grouped = trained_group if parts.optimizer or groups is None else groups
    parallel = parallelise(compiled(module, compile), grouped, make)  # type: ignore[arg-type]
    loss = parts.loss  # of a pipeline a rank keeps its stages alone, and not all parts
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
    """What makes an optimizer of parameters: the user's model's own, or ours of that name. Raises
    ValueError for what cannot stand beside the former.
    """
    if parts.optimizer is None:
        masters = precision.master_weights
        return functools.partial(build_optimizer, optimizer, master_weights=masters, **settings)
    if optimizer != "adamw":
        raise ValueError(f"optimizer is {optimizer!r}; the user's model brings an optimizer itself")
    if precision.master_weights:
        raise ValueError(
            "the user's model brings an optimizer; bf16-master needs --optimizer fused"
        )
    return functools.partial(_of_parameters, parts.optimizer)


def trained_group(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in module.parameters() if p.requires_grad]}]


def _of_parameters(make: Callable[..., Any], groups: Iterable[Any]) -> torch.optim.Optimizer:
    """The user's optimizer, of parameters: a function that sorts them into groups takes no groups."""
    grouped = [group["params"] if isinstance(group, dict) else [group] for group in groups]
    made = make([parameter for group in grouped for parameter in group])
    if not hasattr(made, "step"):
        raise ValueError(f"the optimizer's function returned {type(made).__name__}, no optimizer")
    return made


def _on_device(
    batch: Any, device: torch.device, dtype: torch.dtype, own_types: set[torch.dtype]
) -> Any:
    """The batch's tensors on the device. Floating-point ones get the parameters' type where that is
    not fp32, and where they have a type that the network's had before.
    """
    batch = dict(batch) if isinstance(batch, Mapping) else batch

    def moved(tensor: Tensor) -> Tensor:
        follows = dtype != torch.float32 or tensor.dtype in own_types
        return tensor.to(device, dtype if follows and tensor.is_floating_point() else None)

    return tree_map_only(Tensor, moved, batch)


def in_type(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in a type."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def loss_of(module: Callable[..., Any], batch: Any, loss: Callable[..., Any] | None) -> Tensor:
    """The loss of a batch, as the module's output says it or by the user's function."""
    if loss is None:
        return scalar_loss(_called(module, batch))
    if isinstance(batch, Mapping):
        return scalar_loss(loss(_called(module, batch), batch))
    inputs, targets = inputs_and_targets(batch)
    return scalar_loss(loss(_called(module, inputs), targets))


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Of a batch for a network with a loss. Raises ValueError for another."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError("with a loss function the batch must be a pair (inputs, targets)")
    inputs, targets = batch
    return inputs, targets


def _called(module: Callable[..., Any], inputs: Any) -> Any:
    with named_module(module):
        if isinstance(inputs, Mapping):
            return module(**inputs)
        return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def tensors_of(batch: Any, *, has_loss: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs of the network and targets of its loss. Raises ValueError for a batch of more than
    tensors.
    """
    inputs, targets = inputs_and_targets(batch) if has_loss else (batch, ())
    found = leaves_of(inputs), leaves_of(targets)
    if others := [leaf for leaves in found for leaf in leaves if not isinstance(leaf, Tensor)]:
        raise ValueError(
            f"the batch has {type(others[0]).__name__}; a pipeline splits a batch of tensors alone"
        )
    return found


def leaves_of(batch: Any) -> list[Any]:
    """What its tuples, lists and mappings hold."""
    return tree_leaves(batch)


def with_leaves(batch: Any, leaves: Sequence[Any]) -> Any:
    """Other leaves in the same tuples, lists and mappings."""
    return tree_unflatten(leaves, tree_structure(batch))


def scalar_loss(output: Any) -> Tensor:
    """The loss in what a module returned: itself, its loss, or the mean of its first
    floating-point tensor.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        output = found
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        raise ValueError(
            f"the model returned {type(output).__name__}, without a floating-point tensor"
        )
    return floating[0] if floating[0].ndim == 0 else floating[0].float().mean()
