"""Steps an optimizer with a part of its parameters, and refuses one that needs them all together."""

import collections
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.shares import Share, as_plain

TRIAL_STEPS = 6  # finds an action of every 12th step: in two parts, `step` is called twice as often
TRIAL_LR = 0.1  # updates must be visible in bfloat16 and if a warm-up begins at 0
# Gradients of one half of the parameters are larger, of the other half in the next step. Norms over
# all of them and over a half then differ, also relative to earlier steps, as Adam sees them.
LARGE_GRADIENT = 100.0
TOLERANCE = 0.05  # of an update: matrices that are multiplied in batches are rounded differently
MOST_COPIES = 4  # of each kind in a group; all of 1000 parameters would take seconds

Groups = Sequence[dict[str, Any]]
Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def step_part(
    optimizer: torch.optim.Optimizer, groups: Groups, by_group: Sequence[list[nn.Parameter]]
) -> list[dict[str, Any]]:
    """Updates some parameters of each group; returns the groups' other fields afterwards."""
    parts = zip(groups, by_group, strict=True)
    optimizer.param_groups = [{**group, "params": part} for group, part in parts]
    for parameter in (p for part in by_group for p in part):
        if isinstance(parameter.grad, Share):
            parameter.grad = as_plain(parameter.grad)
    optimizer.step()
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


@torch.no_grad()
def require_separate_updates(build: Build, groups: Groups) -> None:
    """Raises ValueError if the optimizer that `build(groups)` makes needs all parameters together: it
    clips by a norm over all gradients, steps another optimizer, or counts its steps in an attribute.

    A trial finds out. It builds the optimizer with small random copies of some trained parameters,
    takes a few steps, without compiling them, and compares with steps in two parts. An optimizer with
    random steps, or one that raises in the trial (because it needs a closure or other shapes), is not
    refused.
    """
    devices = {p.device for group in groups for p in group["params"] if p.is_cuda}
    with torch.random.fork_rng(list(devices)), torch.compiler.set_stance("force_eager"):
        try:
            optimizer, updates = _trial(build, groups, num_parts=1)
            if _agree(updates, _trial(build, groups, num_parts=2)[1]):
                return
            if not _agree(updates, _trial(build, groups, num_parts=1)[1]):
                return  # its steps are random
        except Exception:
            return
    raise ValueError(
        f"{type(optimizer).__name__} needs all parameters together: in a trial, it gave other weights "
        f"when it stepped one half of them after the other; under a sharded optimizer it has only "
        f"those of one rank"
    )


def _trial(
    build: Build, groups: Groups, *, num_parts: int
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """Returns the optimizer, and by how much it has changed each copy."""
    generator = torch.Generator().manual_seed(0)
    copies = []
    for group in groups:
        fields = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        chosen = _some(group["params"])
        small = [nn.Parameter(_small(p, generator)) for p in chosen]
        copies.append({**fields, "params": small})
    half_of = _halves(p for group in copies for p in group["params"])
    before = [p.clone() for p in half_of]
    optimizer = build(copies)
    groups = optimizer.param_groups
    for group in groups:
        if "lr" in group:
            lr = group["lr"]
            group["lr"] = torch.full_like(lr, TRIAL_LR) if isinstance(lr, Tensor) else TRIAL_LR
    parts = [
        [[p for p in group["params"] if half_of[p] % num_parts == part] for group in groups]
        for part in range(num_parts)
    ]
    for step in range(TRIAL_STEPS):
        for p, half in half_of.items():
            scale = LARGE_GRADIENT if (half + step) % 2 else 1.0
            p.grad = _small(p, generator) * scale
        for by_group in parts:
            fields_after = step_part(optimizer, groups, by_group)
        for group, fields in zip(groups, fields_after, strict=True):
            group.update(fields)
    return optimizer, [p - start for p, start in zip(half_of, before, strict=True)]


def _some(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns the first parameters of each kind that are trained."""
    counts: collections.Counter[Any] = collections.Counter()
    chosen = []
    for p in parameters:
        counts[_kind(p)] += 1
        if p.requires_grad and counts[_kind(p)] <= MOST_COPIES:
            chosen.append(p)
    return chosen


def _halves(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Returns 0 or 1 for each parameter, such that two of a kind are in different halves, since a norm
    may be over the matrices only; so are two parameters of different kinds.
    """
    next_of: dict[Any, int] = {}
    halves = {}
    for p in parameters:
        halves[p] = next_of.setdefault(_kind(p), len(next_of) % 2)
        next_of[_kind(p)] = 1 - halves[p]
    return halves


def _kind(parameter: Tensor) -> Any:
    """Optimizers may treat parameters of different kinds differently."""
    return parameter.ndim, parameter.dtype, parameter.device, parameter.requires_grad


def _small(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Returns random values of the parameter's type, with at most two along each dimension."""
    shape = [min(length, 2) for length in parameter.shape]
    return torch.randn(shape, generator=generator, device="cpu").to(parameter)


def _agree(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return not any(
        bool((a - b).norm() > TOLERANCE * a.norm()) for a, b in zip(first, second, strict=True)
    )
