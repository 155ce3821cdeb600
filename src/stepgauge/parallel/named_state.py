"""Reads and loads the state of a module and its optimizer by parameter name. The names are those of
one process and of torch.distributed.checkpoint.
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
    """Returns the state of model and optimizer by parameter name."""
    with _without_initial_state(optimizer) as was_empty:
        model, of_optimizer = get_state_dict(module, optimizer, options=options)
    if was_empty:
        of_optimizer = {**of_optimizer, "state": {}}
    return {"model": model, "optimizer": of_optimizer}


@contextlib.contextmanager
def _without_initial_state(optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    """Yields True if the optimizer's state is empty, and then keeps torch from filling it with a step
    on zero gradients: momentum would keep the weight decay of that step.
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
    """Loads a state that `state_of` returned. A parameter that was never used has no optimizer state."""
    set_model_state_dict(module, state["model"], options=options)
    if not state["optimizer"]["state"]:  # torch raises, because it finds no device in it
        optimizer.state.clear()
        groups = zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True)
        for group, loaded in groups:
            group.update({name: value for name, value in loaded.items() if name != "params"})
        return
    lenient = dataclasses.replace(options or StateDictOptions(), strict=False)
    with _without_gradients(module):
        set_optimizer_state_dict(module, optimizer, state["optimizer"], options=lenient)
    _copy_shared(optimizer, state["optimizer"])
    for name, parameter in module.named_parameters():
        # torch has made an initial state for it if weights are sharded
        if plain_name(name) not in state["optimizer"]["state"]:
            optimizer.state.pop(parameter, None)


def _copy_shared(optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    """Clones tensors that the optimizer's state shares with the state it was loaded from. torch loads
    tensors without a copy, so two optimizers loaded from one state would both update them.
    """
    of_weights = [each for values in loaded["state"].values() for each in values.values()]
    addresses = {_address(each) for each in of_weights if isinstance(each, Tensor)}
    for values in optimizer.state.values():
        for name, value in values.items():
            if isinstance(value, Tensor) and _address(value) in addresses:
                values[name] = value.clone()


def _address(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


@contextlib.contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """Removes the gradients inside the context. If there are any, torch assumes that the optimizer's
    state is initialised, and loads nothing.
    """
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    module.zero_grad()
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def plain_name(name: str) -> str:
    """Returns the name of a parameter or module without the parts that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def by_name(
    names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer, state: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns the optimizer's state dict with parameter names in place of indices; {} for None."""
    if state is None:
        return {}
    ordered = _ordered(names, optimizer)
    groups = [
        {**group, "params": [ordered[index] for index in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {ordered[index]: values for index, values in state["state"].items()},
        "param_groups": groups,
    }


def by_index(
    names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer, named: dict[str, Any]
) -> dict[str, Any]:
    """Returns a state dict of `by_name` with indices in place of names, for this optimizer."""
    groups = optimizer.state_dict()["param_groups"]
    ordered = _ordered(names, optimizer)
    group_of = {name: group for group in named["param_groups"] for name in group["params"]}
    loaded = [
        {**group_of[ordered[group["params"][0]]], "params": group["params"]}
        if group["params"]
        else group
        for group in groups
    ]
    state = {
        index: named["state"][name] for index, name in enumerate(ordered) if name in named["state"]
    }
    return {"state": state, "param_groups": loaded}


def _ordered(names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the names in the order of the optimizer's groups, which the indices in its state dict
    refer to.
    """
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
