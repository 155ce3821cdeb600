"""What a training step asks of the way in which training is spread over ranks."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stepgauge.parallel.named_state import load_state, state_of

# Splits a module's parameters into an optimizer's groups; builds the optimizer of groups.
Groups = Callable[[nn.Module], Iterable[Any]]
OptimizerClass = Callable[..., torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """A module to call and its optimizer, as a training step uses them. The defaults are those of
    one process alone.

    no_sync      in it, a backward adds to the local gradients
    clip         scales by the norm of the whole gradient, and gives the norm before
    without_axis  by the axes of a layout: in it, nothing is communicated over the axis but all else
                 is done; none of those where that cannot be
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
