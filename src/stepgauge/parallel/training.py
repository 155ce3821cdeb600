"""What a training step needs from the wrapper or layout that spreads it over ranks."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stepgauge.parallel.named_state import load_state, state_of

# Splits a module's parameters into the groups of an optimizer.
Groups = Callable[[nn.Module], Iterable[Any]]
# Builds an optimizer from groups.
OptimizerClass = Callable[..., torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """A module to call and its optimizer, as a training step uses them. The defaults are those of
    one process.

    no_sync       context: backward inside adds to the gradients of this rank only
    clip          scales the gradients to a norm over all ranks, and returns the norm before
    without_axis  by axis of the layout, a context in which nothing is communicated over the axis,
                  but everything else is done. Axes for which that is impossible are missing
    communicate   repeats the communication of a step; None if it cannot be separated from the step
    state         returns the whole state of model and optimizer by parameter name, the same for all
                  wrappers and layouts, on rank 0; on other ranks it is the same or empty. All ranks
                  must call it
    shares        returns this rank's part of that state: its sharded tensors, and tensors that it has
                  whole. The parts of all ranks together are `state`. None if rank 0 has everything
    load          loads a `state`, on every rank
    loads_by_name  True if `load` looks up only the names of this rank, so that a checkpoint can be
                  read lazily
    weight        called with a batch, returns the weight of its mean loss on this rank in the mean
                  over ranks: 1 if all ranks count equally many tokens. All ranks must call it, each
                  with its batch. None means 1
    forward_backward  runs forward and backward of a batch if a schedule interleaves them or a graph
                  replays them. Called with the batch and the number of batches in the step; returns
                  the mean loss divided by that number, or zero if another rank has the loss. None if
                  `module` returns the loss
    evaluate      with `forward_backward`, returns the loss of a batch of any size without gradients,
                  or zero if another rank has it
    spans         with `forward_backward`, returns the actions of the last step with start and end in
                  ms
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
    forward_backward: Callable[[Sequence[Any], int], Tensor] | None = None
    evaluate: Callable[[Sequence[Any]], Tensor] | None = None
    spans: Callable[[], Sequence[tuple[Any, float, float]]] | None = None

    def clip_gradients(self, max_norm: float) -> Tensor:
        if self.clip is not None:
            return self.clip(max_norm)
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


class Communicates(Protocol):
    """An object that skips its communication, but nothing else, while `communicates` is False."""

    communicates: bool


@contextlib.contextmanager
def without_communication(parts: Iterable[Communicates]) -> Iterator[None]:
    """Skips the communication of these objects inside the context, to time everything else."""
    parts = list(parts)
    for part in parts:
        part.communicates = False
    try:
        yield
    finally:
        for part in parts:
            part.communicates = True


# Spreads a module over ranks and builds its optimizer.
Parallelise = Callable[[nn.Module, Groups, OptimizerClass], Parallel]


def single_process(module: nn.Module, groups: Groups, optimizer: OptimizerClass) -> Parallel:
    """Returns the module and its optimizer for training in one process."""
    built = optimizer(groups(module))
    return Parallel(
        module=module,
        optimizer=built,
        state=lambda: state_of(module, built),
        load=lambda state: load_state(module, built, state),
    )
