"""What a training step asks of the way in which training is spread over ranks."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from stepgauge.parallel.sharding import local_part

# Splits a module's parameters into an optimizer's groups; builds the optimizer of groups.
Groups = Callable[[nn.Module], Iterable[Any]]
OptimizerClass = Callable[..., torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """A module to call and its optimizer, as a training step uses them. The defaults are those of
    one process alone.

    no_sync      in it, a backward adds to the local gradients
    clip         scales by the norm of the whole gradient, and gives the norm before
    without_communication  in it, nothing is communicated but all else is done; None where that
                 cannot be
    without_axis  the same of one axis of a layout alone, by its name
    communicate  communicates once more what a step does; None where that cannot be told apart
    state        the whole model and optimizer, by names, alike for every way of spreading them; on
                 rank 0, and nothing or the same on the others. All ranks must call it
    shares       the same of this rank alone: sharded tensors, and what it has whole, alike where
                 other ranks have it too. What all ranks give is `state`. None: rank 0 has it anyway
    load         takes such a state on every rank
    loads_by_name  `load` asks for model and optimizer state by name, and for this rank's names alone:
                 they may be read then
    weight       of a batch, what its mean on this rank weighs in the mean of the ranks' means: 1
                 where all ranks have as many tokens that count. All ranks must call it, with their
                 batches. None: 1
    mixed        forward and backward of a batch where a schedule mixes them: called with the batch
                 and how many such make the step. Its mean loss, divided by that number; zero where
                 another rank has it. None: `module` gives the loss
    evaluate     then, the loss of a batch of any size without gradients, or zero
    spans        then, actions of the last step with start and end in ms
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    clip: Callable[[float], Tensor] | None = None
    without_communication: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    without_axis: Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]] = (
        dataclasses.field(default_factory=dict)
    )
    communicate: Callable[[], None] | None = None
    state: Callable[[], dict[str, Any]] | None = None
    shares: Callable[[], dict[str, Any]] | None = None
    load: Callable[[dict[str, Any]], None] | None = None
    loads_by_name: bool = False
    weight: Callable[[Sequence[Any]], Tensor] | None = None
    mixed: Callable[[Sequence[Any], int], Tensor] | None = None
    evaluate: Callable[[Sequence[Any]], Tensor] | None = None
    spans: Callable[[], Sequence[tuple[Any, float, float]]] | None = None

    def clip_gradients(self, max_norm: float) -> Tensor:
        if self.clip is not None:
            return self.clip(max_norm)
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


class Communicates(Protocol):
    """What sends nothing, and does all else, while `communicates` is False."""

    communicates: bool


@contextlib.contextmanager
def without_communication(parts: Iterable[Communicates]) -> Iterator[None]:
    """In it these compute as much and send nothing: to see what sending costs."""
    silent = list(parts)
    for part in silent:
        part.communicates = False
    try:
        yield
    finally:
        for part in silent:
            part.communicates = True


# How a module and its optimizer are spread: the wrapper of a name with its settings, or alone.
Parallelise = Callable[[nn.Module, Groups, OptimizerClass], Parallel]


def single_process(module: nn.Module, groups: Groups, optimizer: OptimizerClass) -> Parallel:
    """One process with a whole model."""
    stepping = optimizer(groups(module))
    return Parallel(
        module=module,
        optimizer=stepping,
        state=lambda: state_of(module, stepping),
        load=lambda state: load_state(module, stepping, state),
    )


def state_of(
    module: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Model and optimizer by names, as torch.distributed.checkpoint names them."""
    with _without_initial_state(optimizer) as was_empty:
        model, stepping = get_state_dict(module, optimizer, options=options)
    return {"model": model, "optimizer": {**stepping, "state": {}} if was_empty else stepping}


@contextlib.contextmanager
def _without_initial_state(optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    """Keeps torch from filling an empty state by a step with gradients of zero: momentum would
    remember its weight decay. Whether the state is empty.
    """
    if optimizer.state:
        yield False
        return
    for group in optimizer.param_groups:
        optimizer.state.update({parameter: {} for parameter in group["params"]})
    try:
        yield True
    finally:
        optimizer.state.clear()


def load_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    options: StateDictOptions | None = None,
) -> None:
    """Takes what `state_of` gives. A parameter that was never used has no optimizer state."""
    set_model_state_dict(module, state["model"], options=options)
    if not state["optimizer"]["state"]:  # torch finds no device in it, and raises
        optimizer.state.clear()
        groups = zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True)
        for own, given in groups:
            own.update({name: value for name, value in given.items() if name != "params"})
        return
    lenient = dataclasses.replace(options or StateDictOptions(), strict=False)
    with _without_gradients(module):
        set_optimizer_state_dict(module, optimizer, state["optimizer"], options=lenient)
    copy_shared(optimizer, state["optimizer"])
    for name, parameter in module.named_parameters():
        # torch makes an initial state for it where weights are sharded
        if plain_name(name) not in state["optimizer"]["state"]:
            optimizer.state.pop(parameter, None)


def copy_shared(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Copies what the optimizer's state shares with what it was loaded from. torch takes tensors as
    they are given, and two optimizers that were loaded from one state would step them both.
    """
    of_weights = [each for values in given["state"].values() for each in values.values()]
    storages = {_storage(each) for each in of_weights if isinstance(each, Tensor)}
    for values in optimizer.state.values():
        for name, value in values.items():
            if isinstance(value, Tensor) and _storage(value) in storages:
                values[name] = value.clone()


def _storage(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


@contextlib.contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """torch takes an optimizer for initialised where there are gradients, and loads nothing."""
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    module.zero_grad()
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def plain_name(name: str) -> str:
    """As the module names it that torch.compile has wrapped."""
    return name.replace("_orig_mod.", "")


def by_name(
    names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer, whole: dict[str, Any] | None
) -> dict[str, Any]:
    """An optimizer's whole state dict with the parameters' names for their indices; nothing of
    nothing.
    """
    if whole is None:
        return {}
    ordered = _ordered(names, optimizer)
    groups = [
        {**group, "params": [ordered[index] for index in group["params"]]}
        for group in whole["param_groups"]
    ]
    return {
        "state": {ordered[index]: values for index, values in whole["state"].items()},
        "param_groups": groups,
    }


def by_index(
    names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer, named: dict[str, Any]
) -> dict[str, Any]:
    """The inverse, for the parameters in the order in which the optimizer has them."""
    groups = optimizer.state_dict()["param_groups"]
    ordered = _ordered(names, optimizer)
    theirs = {name: group for group in named["param_groups"] for name in group["params"]}
    loaded = [
        {**theirs[ordered[group["params"][0]]], "params": group["params"]}
        if group["params"]
        else group
        for group in groups
    ]
    state = {
        index: named["state"][name] for index, name in enumerate(ordered) if name in named["state"]
    }
    return {"state": state, "param_groups": loaded}


def _ordered(names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer) -> list[str]:
    """Names in the order of the optimizer's groups: an index of its state dict is a place in it."""
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
