"""One step of a pipeline on one rank: runs actions and keeps the tensors between them."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stepgauge.parallel.counted_mean import gradient_of, weighted
from stepgauge.parallel.pipeline.clock import Clock
from stepgauge.parallel.pipeline.graphed import GraphedStage
from stepgauge.parallel.pipeline.host_lead import HostLead
from stepgauge.parallel.pipeline.interfaces import Exchange, Meta
from stepgauge.parallel.pipeline.stage import Stage
from stepgauge.spec.plan.pipeline import Action, Schedule
from stepgauge.spec.plan.pipeline.action import (
    BACKWARD,
    FORWARD,
    RECV_B,
    RECV_F,
    REDUCE,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    WEIGHT,
)

Batch = Sequence[Tensor]
StageRunner = Stage | GraphedStage
Position = tuple[int, int]  # a stage and a micro-batch


class StageWeights(Protocol):
    """The sharded weights of a rank's stages, by stage number."""

    def unshard(self, stage: int) -> None:
        """Gathers the whole weights."""

    def reduce(self, stage: int) -> None:
        """Averages the whole gradients over ranks and keeps this rank's shard."""

    def reshard(self, stage: int) -> None:
        """Frees the whole weights and keeps this rank's shards."""


@dataclasses.dataclass
class PipelineStep:
    """A running step.

    stages        the stages of this rank, by number
    metas         the inputs of every stage, by number
    inputs        of the first stage, one per micro-batch
    targets       of the last stage, one per micro-batch
    loss_weights  weight of each micro-batch's mean loss in the batch's mean; for the last stage
    reduce        called with a stage and its module when the stage's gradients are complete
    lead          limits how far the host runs ahead
    """

    schedule: Schedule
    stages: Mapping[int, StageRunner]
    metas: Mapping[int, Sequence[Meta]]
    transfers: Exchange
    device: torch.device
    inputs: Sequence[Batch]
    targets: Sequence[Batch]
    loss_weights: Tensor
    reduce: Callable[[int, nn.Module], None] | None
    weights: StageWeights | None
    clock: Clock | None
    lead: HostLead
    # On the last stage's rank: the mean loss of each micro-batch so far, and the gradients of the
    # batch's mean with respect to all of them.
    _losses: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    _loss_gradients: Sequence[Tensor] = ()
    # Computed here and not yet read: the inputs of a stage, and the gradients of a stage's outputs.
    _inputs: dict[Position, Sequence[Tensor]] = dataclasses.field(default_factory=dict)
    _gradients: dict[Position, Sequence[Tensor | None]] = dataclasses.field(default_factory=dict)

    def run(self, action: Action) -> None:
        """Runs one action of this rank."""
        stage, kind, micro_batch = action
        if action.is_compute:
            self._compute(action)
        elif kind == SEND_F:
            self.transfers.send(action, self._inputs.pop((stage + 1, micro_batch)))
        elif kind == SEND_B:
            self.transfers.send(action, self._gradients_to_send(stage - 1, micro_batch))
        elif kind == RECV_F:
            self.transfers.receive(action, self.metas[stage])
        elif kind == RECV_B:
            self.transfers.receive(action, [m for m in self.metas[stage + 1] if m.has_gradient])
        elif kind == REDUCE:
            self._reduce(stage)
        elif self.weights is not None and kind == UNSHARD:
            self.weights.unshard(stage)
        elif self.weights is not None and kind == RESHARD:
            self.weights.reshard(stage)

    def _reduce(self, number: int) -> None:
        self.stages[number].finish()
        if self.weights is not None:
            self.weights.reduce(number)
        if self.reduce is not None:
            self.reduce(number, self.stages[number].module)

    def _compute(self, action: Action) -> None:
        """Runs F, B, I or W. The time spent waiting for other ranks is not counted as the action's."""
        number, kind, micro_batch = action
        timing = self.clock.timing(action) if self.clock else contextlib.nullcontext()
        if kind == FORWARD:
            inputs = self._take_inputs(number, micro_batch)
            with timing:
                self._forward(number, micro_batch, inputs)
        elif kind == WEIGHT:
            with timing:
                self.stages[number].backward_weight(micro_batch)
        else:
            gradients = self._take_gradients(number, micro_batch)
            with timing:
                self._backward(action, gradients)
        self.lead.keep()

    def _take_inputs(self, number: int, micro_batch: int) -> Sequence[Tensor]:
        """Returns the inputs of a stage, from the batch, another rank or another stage here."""
        if number == 0:
            return on_device(self.inputs[micro_batch], self.device)
        if self.schedule.crosses(number, number - 1):
            return self.transfers.take(Action(number, RECV_F, micro_batch))
        return self._inputs.pop((number, micro_batch))

    def _forward(self, number: int, micro_batch: int, inputs: Sequence[Tensor]) -> None:
        last = self.schedule.num_stages - 1
        targets = on_device(self.targets[micro_batch], self.device) if number == last else ()
        requires_grad = [meta.requires_grad for meta in self.metas[number]]
        outputs = self.stages[number].forward(micro_batch, inputs, requires_grad, targets)
        if number < last:
            self._inputs[number + 1, micro_batch] = outputs
            return
        (loss,) = outputs
        if not self._losses:
            self._loss_gradients = gradient_of(self.loss_weights).to(loss.dtype).unbind()
        self._losses[micro_batch] = loss
        self._gradients[number, micro_batch] = [self._loss_gradients[micro_batch]]

    @property
    def loss(self) -> Tensor | None:
        """The batch's mean loss at the end of the step, None if the last stage is on another rank."""
        if not self._losses:
            return None
        losses = torch.stack([loss for _, loss in sorted(self._losses.items())])
        dtype = torch.promote_types(losses.dtype, torch.float32)
        return weighted(losses, self.loss_weights.to(dtype)).sum()

    def _take_gradients(self, number: int, micro_batch: int) -> Sequence[Tensor | None]:
        """Returns the gradients of a stage's outputs, one per output."""
        if not self.schedule.crosses(number, number + 1):
            return self._gradients.pop((number, micro_batch))
        received = iter(self.transfers.take(Action(number, RECV_B, micro_batch)))
        return [next(received) if meta.has_gradient else None for meta in self.metas[number + 1]]

    def _backward(self, action: Action, gradients: Sequence[Tensor | None]) -> None:
        """Runs B or I and keeps the gradients of the stage's inputs for the stage before."""
        number, kind, micro_batch = action
        stage = self.stages[number]
        backward = stage.backward if kind == BACKWARD else stage.backward_input
        input_gradients = backward(micro_batch, gradients)
        if number > 0:
            self._gradients[number - 1, micro_batch] = [
                input_gradients.get(position) for position in range(len(self.metas[number]))
            ]

    def _gradients_to_send(self, stage: int, micro_batch: int) -> list[Tensor]:
        """Returns the gradients that the rank of `stage` expects: one for each output that the loss
        depended on when the pipeline was prepared, zeros if the loss does not depend on it now.
        """
        gradients, metas = self._gradients.pop((stage, micro_batch)), self.metas[stage + 1]
        for position, (gradient, meta) in enumerate(zip(gradients, metas, strict=True)):
            if gradient is not None and not meta.affects_loss:
                raise RuntimeError(
                    f"the loss depends on output {position} of stage {stage} now, but did not in the "
                    f"pipeline's first run: call close() on all ranks before such a change, or "
                    f"set every_output=True"
                )
        return [
            meta.empty(self.device).zero_() if gradient is None else gradient
            for gradient, meta in zip(gradients, metas, strict=True)
            if meta.has_gradient
        ]


def on_device(batch: Batch, device: torch.device) -> list[Tensor]:
    """Moves the tensors to the device without waiting for the copies."""
    return [tensor.to(device, non_blocking=True) for tensor in batch]
