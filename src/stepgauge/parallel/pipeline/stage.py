"""One stage of a pipeline: a module, and the state of its micro-batches between their actions."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from stepgauge.parallel.pipeline.interfaces import Meta, StageOutputs
from stepgauge.parallel.pipeline.split import Factors, LayerCalls, SplitBackward, Watch
from stepgauge.parallel.trial import trial


@dataclasses.dataclass
class InFlight:
    """A micro-batch between its forward and the end of its backward.

    inputs   inputs that get a gradient, by position
    edges    gradient edges of the outputs, where backward enters the graph, by position. The
             outputs themselves are not kept here
    calls    calls of the layers whose backward is split
    factors  after I, the factors of the weight gradients that W computes
    """

    inputs: dict[int, Tensor]
    edges: dict[int, Any]
    calls: LayerCalls
    factors: list[Factors] = dataclasses.field(default_factory=list)


class Stage:
    """Runs forward and the parts of backward of a module for many micro-batches.

    module    called with the outputs of the stage before, or with the batch; returns one or several
              tensors
    context   entered around every forward, for example for autocast
    splits    backward runs in two parts, I and W
    loss      for the last stage: called with the module's outputs and the targets. None: the module
              takes the targets too
    unsplit   layers whose backward stays in one part because other stages run them too
    recorded  set by a GraphedStage that records this stage. Weight gradients are then computed with
              autograd.grad and added here, since autograd's own accumulation cannot be recorded
    """

    recorded = False
    num_slots: int | None = None  # the most micro-batches in flight; None: no limit

    def __init__(
        self,
        module: nn.Module,
        *,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        splits: bool,
        loss: Callable[..., Tensor] | None = None,
        unsplit: Collection[nn.Module] = (),
    ):
        self.module, self._context, self.splits, self._loss = module, context, splits, loss
        self._unsplit = unsplit
        self._in_flight: dict[int, InFlight] = {}
        self._modifies: list[bool] = []  # which inputs the module writes in place, by position
        self._outputs: list[Meta] = []  # the outputs when the stage was prepared
        self._split: SplitBackward | None = None

    def prepare(
        self,
        inputs: Sequence[Tensor],
        requires_grad: Sequence[bool],
        targets: Sequence[Tensor] = (),
    ) -> tuple[StageOutputs, list[Tensor]]:
        """Runs the module once to learn its outputs, which inputs they depend on, and which layers
        can delay their weight gradients. Returns the description of the outputs, and the outputs.

        The module runs eagerly even if it is compiled, so that it is only compiled for training.
        Buffers and random state stay as they were.
        """
        self.close()
        leaves = _leaves(inputs, requires_grad)
        with (
            trial(self.module, inputs),
            torch.compiler.set_stance("force_eager"),
            Watch(self.module, excluded=self._unsplit) as watch,
            self._context(),
        ):
            copies = [leaf.clone() for leaf in leaves]
            outputs = self._call(copies, targets)
        self._modifies = [tensor._version > 0 for tensor in copies]
        if self.splits or self.recorded:
            self._split = SplitBackward(self.module, watch.splittable if self.splits else {})
        described = StageOutputs.of(outputs, leaves)
        self._outputs = described.outputs
        return described, [output.detach() for output in outputs]

    def begin(self) -> None:
        """Called before a step."""
        if self._split is not None:
            self._split.begin()

    def finish(self) -> None:
        """Called after the last backward of a step. Nothing is left to do here."""

    def close(self) -> None:
        """Restores the module, and drops the state of unfinished micro-batches."""
        self._in_flight.clear()
        if self._split is not None:
            self._split.close()
            self._split = None

    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        requires_grad: Sequence[bool],
        targets: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """Runs F. `requires_grad` says which inputs get a gradient; only the last stage gets
        targets.
        """
        leaves = _leaves(inputs, requires_grad)
        with self._context(), self._collect_calls() as calls:
            # autograd refuses in-place writes into leaves
            arguments = [
                leaf.clone() if modifies else leaf
                for leaf, modifies in zip(leaves, self._modifies, strict=True)
            ]
            outputs = self._call(arguments, targets)
        _check_outputs(outputs, self._outputs)
        self._in_flight[micro_batch] = InFlight(
            inputs={n: leaf for n, leaf in enumerate(leaves) if leaf.requires_grad},
            edges={n: get_gradient_edge(y) for n, y in enumerate(outputs) if y.requires_grad},
            calls=calls,
        )
        return tuple(output.detach() for output in outputs)

    def evaluate(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs and keeps nothing for backward."""
        with self._context():
            return list(self._call(inputs, targets))

    def _collect_calls(self) -> contextlib.AbstractContextManager[LayerCalls]:
        return contextlib.nullcontext([]) if self._split is None else self._split.forward()

    def _call(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self._loss is None:
            return as_tuple(self.module(*inputs, *targets))
        return as_tuple(self._loss(*as_tuple(self.module(*inputs)), *targets))

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """Runs I, or B if the stage is not split. Returns the gradients of the inputs by position.

        gradients  one per output; None if no gradient came back
        """
        state = self._in_flight[micro_batch]
        positions = [n for n in state.edges if gradients[n] is not None]
        edges, incoming = [state.edges[n] for n in positions], [gradients[n] for n in positions]
        inputs = state.inputs
        state.edges = {}  # frees the graph with the backward
        if self._split is not None:
            input_gradients, state.factors = self._split.input_gradients(
                edges, incoming, list(inputs.values()), state.calls
            )
            state.inputs, state.calls = {}, []
            return dict(zip(inputs, input_gradients, strict=True))
        if edges:
            torch.autograd.backward(edges, incoming)
        del self._in_flight[micro_batch]
        return {position: leaf.grad for position, leaf in inputs.items()}

    def backward_weight(self, micro_batch: int) -> None:
        """Runs W, the last action of the micro-batch."""
        for factors in self._in_flight.pop(micro_batch).factors:
            factors.accumulate()

    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """Runs B. Returns the gradients of the inputs by position."""
        input_gradients = self.backward_input(micro_batch, gradients)
        if self._split is not None:
            self.backward_weight(micro_batch)
        return input_gradients


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Returns one or several tensors as a tuple. Raises TypeError for anything else."""
    values = outputs if isinstance(outputs, tuple | list) else (outputs,)
    for position, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"output {position} of a stage is {type(value).__name__}; a stage returns a tensor, "
                f"or a tuple or list of tensors"
            )
    return tuple(values)


def _leaves(inputs: Sequence[Tensor], requires_grad: Sequence[bool]) -> list[Tensor]:
    return [
        tensor.detach().requires_grad_(required)
        for tensor, required in zip(inputs, requires_grad, strict=True)
    ]


def _check_outputs(outputs: Sequence[Tensor], prepared: Sequence[Meta]) -> None:
    """Raises RuntimeError if the outputs differ from those of `prepare`, which other ranks expect."""
    if len(outputs) != len(prepared):
        raise RuntimeError(
            f"a stage returned {len(outputs)} tensors; it returned {len(prepared)} in its first run"
        )
    for position, (output, meta) in enumerate(zip(outputs, prepared, strict=True)):
        if (output.shape, output.dtype) != (meta.shape, meta.dtype):
            raise RuntimeError(
                f"output {position} of a stage is {_describe(output)}; it was {_describe(meta)} in "
                f"the stage's first run, and other ranks expect that"
            )
        if output.requires_grad and not meta.requires_grad:
            raise RuntimeError(
                f"output {position} of a stage depends on trainable weights now, but did not in the "
                f"stage's first run: call close() on all ranks after you unfreeze layers"
            )


def _describe(tensor: Tensor | Meta) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
