"""One step of a pipeline on one rank: its actions, and the tensors that lie between them."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stepgauge.parallel.counted_mean import gradient_of, weighted
from stepgauge.parallel.pipeline.between import Meta
from stepgauge.parallel.pipeline.clock import Clock
from stepgauge.parallel.pipeline.graphed import GraphedStage
from stepgauge.parallel.pipeline.peer_transfers import PeerTransfers
from stepgauge.parallel.pipeline.stage import Stage
from stepgauge.parallel.pipeline.transfers import Transfers
from stepgauge.spec.plan.pipeline import Action, Schedule
from stepgauge.spec.plan.pipeline.action import BACKWARD, FORWARD, REDUCE, UNSHARD, WEIGHT

Batch = Sequence[Tensor]
StageRunner = Stage | GraphedStage


class StageWeights(Protocol):
    """Of the stages of a rank, by their numbers."""

    def unshard(self, stage: int) -> None:
        """Makes them whole."""

    def reduce(self, stage: int) -> None:
        """Averages the whole gradients into the shards'."""

    def reshard(self, stage: int) -> None:
        """Leaves this rank its shards."""


@dataclasses.dataclass
class PipelineStep:
    """A step while it runs.

    metas    what goes into each stage, by its number
    inputs   of each micro-batch, for the first stage; `targets` for the last one
    shares   of each micro-batch, its part of the whole batch's mean; for the last stage
    loss     the sum so far, on the last stage's rank
    """

    schedule: Schedule
    stages: Mapping[int, StageRunner]
    metas: Mapping[int, Sequence[Meta]]
    transfers: Transfers | PeerTransfers
    device: torch.device
    inputs: Sequence[Batch]
    targets: Sequence[Batch]
    shares: Tensor
    reduce: Callable[[int, nn.Module], None] | None
    weights: StageWeights | None
    clock: Clock | None
    loss: Tensor | None = None
    # What a stage of this rank reads: by stage and micro-batch.
    _activations: dict[tuple[int, int], Sequence[Tensor]] = dataclasses.field(default_factory=dict)
    _gradients: dict[tuple[int, int], Sequence[Tensor | None]] = dataclasses.field(
        default_factory=dict
    )

    def act(self, action: Action) -> None:
        stage, kind, micro_batch = action
        if action.is_compute:
            given = self._read(action)  # waiting for other ranks is no part of the action
            with self.clock.of(action) if self.clock else contextlib.nullcontext():
                self._compute(action, given)
        elif kind == "SEND_F":
            self.transfers.send(action, self._activations.pop((stage + 1, micro_batch)))
        elif kind == "SEND_B":
            self.transfers.send(action, self._gradients_of(stage - 1, micro_batch))
        elif kind == "RECV_F":
            self.transfers.receive(action, self.metas[stage])
        elif kind == "RECV_B":
            self.transfers.receive(action, [m for m in self.metas[stage + 1] if m.has_gradient])
        else:
            self._of_stage(stage, kind)

    def _of_stage(self, number: int, kind: str) -> None:
        """Work on a stage's weights and gradients."""
        if kind == REDUCE:
            self.stages[number].finish()
            if self.weights is not None:
                self.weights.reduce(number)
            if self.reduce is not None:
                self.reduce(number, self.stages[number].module)
        elif self.weights is not None:
            change = self.weights.unshard if kind == UNSHARD else self.weights.reshard
            change(number)

    def _read(self, action: Action) -> Sequence[Tensor | None]:
        """The inputs of a forward, the gradients of a backward's outputs."""
        number, kind, micro_batch = action
        if kind == WEIGHT:
            return ()
        return (self._inputs if kind == FORWARD else self._incoming)(number, micro_batch)

    def _compute(self, action: Action, given: Sequence[Any]) -> None:
        number, kind, micro_batch = action
        stage = self.stages[number]
        if kind == FORWARD:
            self._forward(number, micro_batch, given)
        elif kind == WEIGHT:
            stage.backward_weight(micro_batch)
        else:
            backward = stage.backward if kind == BACKWARD else stage.backward_input
            found = backward(micro_batch, given)
            if number > 0:
                self._gradients[number - 1, micro_batch] = [
                    found.get(place) for place in range(len(self.metas[number]))
                ]

    def _inputs(self, number: int, micro_batch: int) -> Sequence[Tensor]:
        if number == 0:
            return on_device(self.inputs[micro_batch], self.device)
        if self.schedule.crosses(number, number - 1):
            return self.transfers.take(Action(number, "RECV_F", micro_batch))
        return self._activations.pop((number, micro_batch))

    def _forward(self, number: int, micro_batch: int, inputs: Sequence[Tensor]) -> None:
        last = self.schedule.num_stages - 1
        targets = on_device(self.targets[micro_batch], self.device) if number == last else ()
        trained = [meta.is_trained for meta in self.metas[number]]
        outputs = self.stages[number].forward(micro_batch, inputs, trained, targets)
        if number < last:
            self._activations[number + 1, micro_batch] = outputs
            return
        (loss,) = outputs
        share = self.shares[micro_batch]
        self._gradients[number, micro_batch] = [gradient_of(share).to(loss.dtype)]
        loss = weighted(loss, share)
        self.loss = loss if self.loss is None else self.loss + loss

    def _incoming(self, number: int, micro_batch: int) -> Sequence[Tensor | None]:
        """The gradients of a stage's outputs, by position."""
        if not self.schedule.crosses(number, number + 1):
            return self._gradients.pop((number, micro_batch))
        received = iter(self.transfers.take(Action(number, "RECV_B", micro_batch)))
        return [next(received) if meta.has_gradient else None for meta in self.metas[number + 1]]

    def _gradients_of(self, stage: int, micro_batch: int) -> list[Tensor]:
        """What goes back to a stage on another rank, which expects a gradient of each output that
        the loss depended on in the first step: zeros where it does not now.
        """
        gradients, metas = self._gradients.pop((stage, micro_batch)), self.metas[stage + 1]
        for place, (gradient, meta) in enumerate(zip(gradients, metas, strict=True)):
            if gradient is not None and not meta.is_used:
                raise RuntimeError(
                    f"the loss depends on output {place} of stage {stage} now, and did not when the "
                    f"pipeline was run first: call close() on all ranks before such a change, or "
                    f"choose every_output=True"
                )
        return [
            meta.empty(self.device).zero_() if gradient is None else gradient
            for gradient, meta in zip(gradients, metas, strict=True)
            if meta.has_gradient
        ]


def on_device(batch: Batch, device: torch.device) -> list[Tensor]:
    return [tensor.to(device, non_blocking=True) for tensor in batch]
