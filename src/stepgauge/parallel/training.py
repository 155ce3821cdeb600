"""What a training step asks of the way in which training is spread over ranks."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Splits a module's parameters into an optimizer's groups; builds the optimizer of groups.
Groups = Callable[[nn.Module], Iterable[Any]]
OptimizerClass = Callable[..., torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """A module to call and its optimizer, as a training step uses them. The defaults are those of one process alone.

    finish       waits for the gradients of all ranks; before the optimizer
    no_sync      in it, a backward adds to the local gradients
    clip         scales by the norm of the whole gradient, and gives the norm before
    silence      in it, nothing is communicated but all else is done; None where that cannot be
    communicate  communicates once more what a step does; None where that cannot be told apart
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None] = lambda: None
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    clip: Callable[[float], Tensor] | None = None
    silence: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    communicate: Callable[[], None] | None = None

    def clip_gradients(self, max_norm: float) -> Tensor:
        if self.clip is not None:
            return self.clip(max_norm)
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


# How a module and its optimizer are spread: the wrapper of a name with its settings, or alone.
Parallelise = Callable[[nn.Module, Groups, OptimizerClass], Parallel]


def alone(module: nn.Module, groups: Groups, optimizer: OptimizerClass) -> Parallel:
    """One process with a whole model."""
    return Parallel(module=module, optimizer=optimizer(groups(module)))
