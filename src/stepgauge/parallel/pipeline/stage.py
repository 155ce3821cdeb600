"""One stage of a pipeline: a module, and what its micro-batches keep between their actions."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from stepgauge.parallel.pipeline.split import Factors, SplitBackward, Watch
from stepgauge.parallel.trial import trial


class Meta(NamedTuple):
    """What a tensor between two stages looks like, and whether a gradient comes back for it."""

    shape: torch.Size
    dtype: torch.dtype
    is_trained: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def noise(self, device: torch.device) -> Tensor:
        """Normal values; zeros where the type has none."""
        empty = self.empty(device)
        return empty.normal_() if self.dtype.is_floating_point else empty.zero_()


@dataclasses.dataclass
class Kept:
    """Of a micro-batch between forward and backward.

    inputs  those that get a gradient, by position
    edges   where backward enters the graph, by position of the output; the outputs themselves
            belong to who reads them
    """

    inputs: dict[int, Tensor]
    edges: dict[int, Any]
    factors: list[Factors] = dataclasses.field(default_factory=list)


class Stage:
    """A module that runs forward and the parts of backward for many micro-batches.

    module   called with the tensors of the stage before (or the batch), gives one or several
    context  around every forward: autocast, mostly
    splits   whether its backward is run in two parts
    loss     of the last stage: called with its outputs and the targets; without it the module
             takes the targets too
    recorded whether it is run by a GraphedStage: gradients of weights are asked for and added, for
             autograd's own accumulation cannot be recorded
    whole    layers whose backward stays in one part: other stages run them too
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        splits: bool,
        loss: Callable[..., Tensor] | None = None,
        recorded: bool = False,
        whole: Collection[nn.Module] = (),
    ):
        self.module, self._context, self.splits, self._loss = module, context, splits, loss
        self._recorded, self._whole = recorded, whole
        self._kept: dict[int, Kept] = {}
        self._written: list[bool] = []  # whether the module writes into an input, by position
        self._split: SplitBackward | None = None

    def prepare(
        self, inputs: Sequence[Meta], example: Sequence[Tensor], targets: Sequence[Tensor] = ()
    ) -> list[Meta]:
        """Runs the module once, without gradients, to learn what it gives and which layers' weight
        gradients can wait.

        It runs eagerly: a module is compiled for what it does in training. Buffers and random state
        stay as they were.
        """
        self.close()
        given = [tensor.clone() for tensor in example]
        with (
            trial(self.module, example),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            Watch(self.module, besides=self._whole) as watch,
            self._context(),
        ):
            outputs = self._call(given, targets)
        self._written = [tensor._version > 0 for tensor in given]
        if self.splits or self._recorded:
            self._split = SplitBackward(self.module, watch.splittable if self.splits else {})
        trains = any(meta.is_trained for meta in inputs) or any(
            parameter.requires_grad for parameter in self.module.parameters()
        )
        return [Meta(o.shape, o.dtype, trains and o.is_floating_point()) for o in outputs]

    def record(
        self, inputs: Sequence[Meta], outputs: Sequence[Meta], targets: Sequence[Tensor]
    ) -> None:
        """Nothing: it runs eagerly. As all three, for GraphedStage."""

    def begin(self) -> None:
        """Before a step."""

    def finish(self) -> None:
        """When the gradients of a step are there."""

    def close(self) -> None:
        """Gives the module back as it was, and drops what unfinished micro-batches keep."""
        self._kept.clear()
        if self._split is not None:
            self._split.close()
            self._split = None

    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        trained: Sequence[bool],
        targets: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """F. `trained` says which inputs get a gradient; the last stage gets the targets."""
        leaves = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(inputs, trained, strict=True)
        ]
        with self._context():
            written = zip(leaves, self._written, strict=True)
            outputs = self._call([x.clone() if own else x for x, own in written], targets)
        self._kept[micro_batch] = Kept(
            {place: leaf for place, leaf in enumerate(leaves) if leaf.requires_grad},
            {
                place: get_gradient_edge(output)
                for place, output in enumerate(outputs)
                if output.requires_grad
            },
        )
        return tuple(output.detach() for output in outputs)

    def evaluate(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """What the stage gives, of which nothing is kept."""
        with self._context():
            return list(self._call(inputs, targets))

    def _call(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self._loss is None:
            return as_tuple(self.module(*inputs, *targets))
        return as_tuple(self._loss(*as_tuple(self.module(*inputs)), *targets))

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """I, or B where the stage is not split: the gradients of the inputs, by position.

        gradients  of the outputs; None where nothing came back
        """
        kept = self._kept[micro_batch]
        entered = [
            (edge, gradients[place])
            for place, edge in kept.edges.items()
            if gradients[place] is not None
        ]
        edges, given = [edge for edge, _ in entered], [gradient for _, gradient in entered]
        inputs, places = list(kept.inputs.values()), list(kept.inputs)
        kept.edges = {}
        if self._split is not None:
            found, kept.factors = self._split.input_gradients(edges, given, inputs)
            kept.inputs = {}
            return dict(zip(places, found, strict=True))
        if edges:
            torch.autograd.backward(edges, given)
        del self._kept[micro_batch]
        return {place: leaf.grad for place, leaf in zip(places, inputs, strict=True)}

    def backward_weight(self, micro_batch: int) -> None:
        """W. Nothing is left of the micro-batch afterwards."""
        for factors in self._kept.pop(micro_batch).factors:
            factors.accumulate()

    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """B."""
        found = self.backward_input(micro_batch, gradients)
        if self._split is not None:
            self.backward_weight(micro_batch)
        return found


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Raises TypeError for what is neither a tensor nor several."""
    several = (outputs,) if isinstance(outputs, Tensor) else outputs
    if not isinstance(several, tuple | list) or not all(isinstance(o, Tensor) for o in several):
        raise TypeError(f"a stage gave {type(outputs).__name__}; it must give a tensor or several")
    return tuple(several)
