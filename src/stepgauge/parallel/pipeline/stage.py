"""One stage of a pipeline: a module, and what its micro-batches keep between their actions."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from stepgauge.parallel.pipeline.between import Given, Meta
from stepgauge.parallel.pipeline.split import Calls, Factors, SplitBackward, Watch
from stepgauge.parallel.trial import trial


@dataclasses.dataclass
class Kept:
    """Of a micro-batch between forward and backward.

    inputs  those that get a gradient, by position
    edges   where backward enters the graph, by position of the output; the outputs themselves
            belong to who reads them
    calls   of the layers whose backward is split
    """

    inputs: dict[int, Tensor]
    edges: dict[int, Any]
    calls: Calls
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

    num_slots: int | None = (
        None  # for so many micro-batches between forward and backward; None: any
    )

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
        self._outputs: list[Meta] = []  # as they were when it was prepared
        self._split: SplitBackward | None = None

    def prepare(
        self, inputs: Sequence[Tensor], trained: Sequence[bool], targets: Sequence[Tensor] = ()
    ) -> tuple[Given, list[Tensor]]:
        """Runs the module once, to learn what it gives, of what, and which layers' weight gradients
        can wait; `trained` says which inputs depend on trained weights.

        It runs eagerly: a module is compiled for what it does in training. Buffers and random state
        stay as they were.
        """
        self.close()
        leaves = _leaves(inputs, trained)
        with (
            trial(self.module, inputs),
            torch.compiler.set_stance("force_eager"),
            Watch(self.module, besides=self._whole) as watch,
            self._context(),
        ):
            own = [leaf.clone() for leaf in leaves]
            outputs = self._call(own, targets)
        self._written = [tensor._version > 0 for tensor in own]
        if self.splits or self._recorded:
            self._split = SplitBackward(self.module, watch.splittable if self.splits else {})
        given = Given.of(outputs, leaves)
        self._outputs = given.outputs
        return given, [output.detach() for output in outputs]

    def begin(self) -> None:
        """Before a step."""
        if self._split is not None:
            self._split.begin()

    def finish(self) -> None:
        """When the gradients of a step are there: autograd has added them."""

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
        leaves = _leaves(inputs, trained)
        with self._context(), self._calls() as calls:
            written = zip(leaves, self._written, strict=True)
            outputs = self._call([x.clone() if own else x for x, own in written], targets)
        _require_alike(outputs, self._outputs)
        trained_leaves = {n: leaf for n, leaf in enumerate(leaves) if leaf.requires_grad}
        edges = {n: get_gradient_edge(y) for n, y in enumerate(outputs) if y.requires_grad}
        self._kept[micro_batch] = Kept(trained_leaves, edges, calls)
        return tuple(output.detach() for output in outputs)

    def evaluate(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """What the stage gives, of which nothing is kept."""
        with self._context():
            return list(self._call(inputs, targets))

    def _calls(self) -> contextlib.AbstractContextManager[Calls]:
        """Of the layers whose backward is split, in the forward inside."""
        return contextlib.nullcontext([]) if self._split is None else self._split.forward()

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
            found, kept.factors = self._split.input_gradients(edges, given, inputs, kept.calls)
            kept.inputs, kept.calls = {}, []
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
    several = outputs if isinstance(outputs, tuple | list) else (outputs,)
    for place, output in enumerate(several):
        if not isinstance(output, Tensor):
            raise TypeError(
                f"output {place} of a stage is {type(output).__name__}; a stage gives a tensor, or "
                f"a tuple or list of tensors"
            )
    return tuple(several)


def _leaves(inputs: Sequence[Tensor], trained: Sequence[bool]) -> list[Tensor]:
    return [
        tensor.detach().requires_grad_(needs) for tensor, needs in zip(inputs, trained, strict=True)
    ]


def _require_alike(outputs: Sequence[Tensor], prepared: Sequence[Meta]) -> None:
    """Raises RuntimeError for what the other ranks do not expect."""
    if len(outputs) != len(prepared):
        raise RuntimeError(
            f"a stage gave {len(outputs)} tensors; it gave {len(prepared)} when it was run first"
        )
    for place, (output, meta) in enumerate(zip(outputs, prepared, strict=True)):
        if (output.shape, output.dtype) != (meta.shape, meta.dtype):
            raise RuntimeError(
                f"output {place} of a stage is {_described(output)}; it was {_described(meta)} "
                f"when the stage was run first, and other ranks expect that"
            )
        if output.requires_grad and not meta.is_trained:
            raise RuntimeError(
                f"output {place} of a stage depends on trained weights now, and did not when the "
                f"stage was run first: call close() on all ranks after layers are unfrozen"
            )


def _described(tensor: Tensor | Meta) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
