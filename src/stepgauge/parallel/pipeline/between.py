"""What lies between the stages of a pipeline: found by running them once, one after the other."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


class Meta(NamedTuple):
    """What a tensor between two stages looks like.

    is_trained  it depends on weights that are trained, so that a gradient is asked for
    is_used     the loss depends on it, so that there is one
    """

    shape: torch.Size
    dtype: torch.dtype
    is_trained: bool = False
    is_used: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back for it."""
        return self.is_trained and self.is_used

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def noise(self, device: torch.device) -> Tensor:
        """Normal values; zeros where the type has none."""
        empty = self.empty(device)
        return empty.normal_() if self.dtype.is_floating_point else empty.zero_()


class Given(NamedTuple):
    """What a stage has given, and the inputs that each output depends on, by their places."""

    outputs: list[Meta]
    reads: list[set[int]]

    @classmethod
    def of(cls, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Self:
        return cls([Meta.of(output) for output in outputs], [_read(o, inputs) for o in outputs])


def _read(output: Tensor, inputs: Sequence[Tensor]) -> set[int]:
    """The inputs, of leaves, that a backward from the output comes to."""
    leaves = {
        get_gradient_edge(leaf).node: place
        for place, leaf in enumerate(inputs)
        if leaf.requires_grad
    }
    waiting: list[Node | None] = [get_gradient_edge(output).node] if output.requires_grad else []
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {place for leaf, place in leaves.items() if leaf in seen}


def inputs_of(
    first: Sequence[Meta], given: Mapping[int, Given], *, every_output: bool = False
) -> dict[int, list[Meta]]:
    """The inputs of each stage, of what all stages have given: the loss depends on an output if it
    does on one of the next stage that reads it. Raises ValueError where the last one is no loss.

    every_output  counts each output as one that the loss depends on
    """
    inputs, last = {0: list(first)}, max(given)
    shapes = [tuple(meta.shape) for meta in given[last].outputs]
    if shapes != [()]:
        raise ValueError(
            f"the last stage gives tensors of shapes {shapes}; its loss must be one number, a mean "
            f"over the micro-batch"
        )
    used = {0}
    for stage in range(last, 0, -1):
        used = set().union(*(given[stage].reads[place] for place in used))
        inputs[stage] = [
            meta._replace(is_used=every_output or place in used)
            for place, meta in enumerate(given[stage - 1].outputs)
        ]
    return dict(sorted(inputs.items()))
