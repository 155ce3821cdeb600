"""A module's and an optimizer's state by the names of the parameters, as one process would have them
and as torch.distributed.checkpoint names them, and back.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from stepgauge.parallel.sharding import local_part


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
