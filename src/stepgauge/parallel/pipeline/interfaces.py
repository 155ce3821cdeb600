"""The tensors between stages, which the pipeline learns by running each stage once, and how they
travel between ranks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from stepgauge.spec.plan.pipeline import Action, Channel


class Meta(NamedTuple):
    """A tensor that one stage passes to the next.

    requires_grad  the tensor depends on trainable weights
    affects_loss   the loss depends on the tensor
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool = False
    affects_loss: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    @property
    def has_gradient(self) -> bool:
        """True if the next stage sends a gradient back for this tensor."""
        return self.requires_grad and self.affects_loss

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def noise(self, device: torch.device) -> Tensor:
        """Returns normally distributed values, or zeros for integer types."""
        empty = self.empty(device)
        return empty.normal_() if self.dtype.is_floating_point else empty.zero_()


class Exchange(Protocol):
    """How a rank sends tensors to other ranks and receives theirs (transfers.py, peer_transfers.py).

    can_restart  it can be used again after a step that raised, once it is prepared again
    """

    can_restart: bool

    def prepare(self, messages: Mapping[Channel, Sequence[Meta]]) -> None:
        """Gets ready for messages of these tensors. All ranks must call it at the same time."""

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Starts to send the tensors, and keeps them alive until they have been sent."""

    def receive(self, action: Action, metas: Sequence[Meta]) -> None:
        """Starts to receive tensors of these shapes; `take` returns them."""

    def take(self, action: Action) -> list[Tensor]:
        """Returns the received tensors. On a GPU the current stream waits for them."""

    def finish(self) -> None:
        """Waits for all sends."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the tensor with its values in memory in order, as it can be sent."""
    return tensor.resolve_conj().resolve_neg().contiguous()


class StageOutputs(NamedTuple):
    """The outputs of a stage and, for each, the positions of the inputs that it depends on."""

    outputs: list[Meta]
    dependencies: list[set[int]]

    @classmethod
    def of(cls, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Self:
        """Describes the outputs computed from `inputs`, which are leaves of the autograd graph."""
        return cls([Meta.of(y) for y in outputs], [_dependencies(y, inputs) for y in outputs])


def _dependencies(output: Tensor, inputs: Sequence[Tensor]) -> set[int]:
    """Returns the positions of the inputs that a backward from the output reaches."""
    leaves = {
        get_gradient_edge(leaf).node: position
        for position, leaf in enumerate(inputs)
        if leaf.requires_grad
    }
    waiting: list[Node | None] = [get_gradient_edge(output).node] if output.requires_grad else []
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {position for leaf, position in leaves.items() if leaf in seen}


def stage_inputs(
    batch: Sequence[Meta], outputs: Mapping[int, StageOutputs], *, every_output: bool = False
) -> dict[int, list[Meta]]:
    """Returns the inputs of each stage, with `affects_loss` set. The loss depends on an input of a
    stage if it depends on an output that is computed from it.

    batch         the inputs of the first stage
    outputs       the outputs of each stage
    every_output  treats the loss as depending on every output

    Raises ValueError if the output of the last stage is not a loss.
    """
    inputs, last = {0: list(batch)}, max(outputs)
    shapes = [tuple(meta.shape) for meta in outputs[last].outputs]
    if shapes != [()]:
        raise ValueError(
            f"the last stage returns tensors of shapes {shapes}; it must return one number, the "
            f"mean loss of the micro-batch"
        )
    used = {0}  # positions of the outputs of `stage` that affect the loss
    for stage in range(last, 0, -1):
        used = set().union(*(outputs[stage].dependencies[position] for position in used))
        inputs[stage] = [
            meta._replace(affects_loss=every_output or position in used)
            for position, meta in enumerate(outputs[stage - 1].outputs)
        ]
    return dict(sorted(inputs.items()))
