"""A stage whose forward and backward are recorded once and replayed, to save the host's launch time.

A CUDA graph reads and writes the memory that it was recorded with. A stage therefore has a *slot*
for each micro-batch that is in flight at the same time: static inputs, targets and gradients, which
are written before a replay, and one graph per kind of action. The graphs of a slot share a memory
pool and run in the order in which they were recorded. Slots share no memory, so their micro-batches
may be in flight together. Outputs of a replay are copied, because a transfer may still read them
when the slot is used again.

Weight gradients add up in static tensors. These become `.grad` if it is None when a step begins;
otherwise they are added to `.grad` when the step ends.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.pipeline.interfaces import Meta, StageOutputs
from stepgauge.parallel.pipeline.stage import Stage
from stepgauge.parallel.trial import trial
from stepgauge.runtime.recording import WARM_UPS, Call, Recorder, parameter_locations
from stepgauge.spec.plan.pipeline.action import FORWARD, INPUT, WEIGHT


@dataclasses.dataclass
class Slot:
    """The static tensors of one micro-batch in flight, and the replays that use them.

    inputs, targets, gradients  written before a replay; `gradients` are those of the outputs
    outputs, input_gradients    written by replays
    replays                     by kind of action
    """

    number: int
    inputs: list[Tensor]
    targets: list[Tensor]
    gradients: list[Tensor | None]
    outputs: tuple[Tensor, ...] = ()
    input_gradients: dict[int, Tensor | None] = dataclasses.field(default_factory=dict)
    replays: dict[str, Call] = dataclasses.field(default_factory=dict)


class GraphedStage:
    """Has the methods of Stage, with one slot per micro-batch in flight.

    The module's Python code runs only while it is recorded. Shapes, branches and the set of
    trainable parameters are fixed from then on, and hooks on parameters do not run.
    """

    def __init__(self, stage: Stage, recorder: Recorder, slots: int, device: torch.device):
        self.module, self.splits = stage.module, stage.splits
        self._stage, self._recorder, self._device = stage, recorder, device
        stage.recorded = True
        self.num_slots = slots
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._used: dict[int, Slot] = {}
        # static tensors in which the gradients add up
        self._sums: list[tuple[nn.Parameter, Tensor]] = []
        # those of parameters that had another tensor as `.grad` when the step began
        self._to_add: list[tuple[nn.Parameter, Tensor]] = []
        self._recorded_places: list[tuple[int, bool]] = []

    def prepare(
        self,
        inputs: Sequence[Tensor],
        requires_grad: Sequence[bool],
        targets: Sequence[Tensor] = (),
    ) -> tuple[StageOutputs, list[Tensor]]:
        return self._stage.prepare(inputs, requires_grad, targets)

    def evaluate(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        return self._stage.evaluate(inputs, targets)

    # -- recording -------------------------------------------------------------------------------

    def record(
        self, inputs: Sequence[Meta], outputs: Sequence[Meta], targets: Sequence[Tensor]
    ) -> None:
        """Records forward and backward for every slot, after `prepare`. Buffers, gradients and random
        state stay as they were.
        """
        device = self._device
        self._slots = [
            Slot(
                number,
                [meta.noise(device) for meta in inputs],
                [target.clone() for target in targets],
                [meta.noise(device) if meta.has_gradient else None for meta in outputs],
            )
            for number in range(self.num_slots)
        ]
        requires_grad = [meta.requires_grad for meta in inputs]
        parameters = list(self.module.parameters())
        gradients = [parameter.grad for parameter in parameters]
        with trial(self.module, [*self._slots[0].inputs, *self._slots[0].targets]):
            for parameter in parameters:
                parameter.grad = None
            for _ in range(WARM_UPS):
                self._recorder.warm_up(lambda: self._run(self._slots[0], requires_grad))
            self._sums = [
                (p, torch.zeros_like(p.grad, memory_format=torch.preserve_format))
                for p in parameters
                if p.grad is not None
            ]
            for parameter, total in self._sums:
                parameter.grad = total
            for slot in self._slots:
                self._record_slot(slot, requires_grad)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._recorded_places = parameter_locations(self.module)

    def _run(self, slot: Slot, requires_grad: Sequence[bool]) -> None:
        self._stage.forward(slot.number, slot.inputs, requires_grad, slot.targets)
        self._stage.backward(slot.number, slot.gradients)

    def _record_slot(self, slot: Slot, requires_grad: Sequence[bool]) -> None:
        stage, number = self._stage, slot.number
        kinds: dict[str, Callable[[], Any]] = {
            FORWARD: lambda: stage.forward(number, slot.inputs, requires_grad, slot.targets),
            INPUT: lambda: stage.backward(number, slot.gradients),
        }
        if self.splits:
            kinds[INPUT] = lambda: stage.backward_input(number, slot.gradients)
            kinds[WEIGHT] = lambda: stage.backward_weight(number)
        results = {}
        for kind, run in kinds.items():
            results[kind], slot.replays[kind] = self._recorder.record(run, (id(self), number))
        slot.outputs, slot.input_gradients = results[FORWARD], results[INPUT]

    # -- a step ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Makes `.grad` the static sums wherever it is None. Other gradients are added to by `finish`.

        Raises RuntimeError if weights have moved, been frozen or been unfrozen since the recording.
        """
        if parameter_locations(self.module) != self._recorded_places:
            raise RuntimeError(
                "weights have moved, or were frozen or unfrozen, since their stage was recorded as "
                "CUDA graphs; create a new pipeline, or one without graphs"
            )
        self._free, self._used = list(reversed(self._slots)), {}
        fresh = [(p, total) for p, total in self._sums if p.grad is not total]
        if fresh:
            torch._foreach_zero_([total for _, total in fresh])
        self._to_add = [(p, total) for p, total in fresh if p.grad is not None]
        for parameter, total in fresh:
            if parameter.grad is None:
                parameter.grad = total

    @torch.no_grad()
    def finish(self) -> None:
        """Called after the last backward of a step, before `.grad` is read."""
        for parameter, total in self._to_add:
            assert parameter.grad is not None, "it had a gradient when the step began"
            parameter.grad.add_(total)
        self._to_add = []

    @torch.no_grad()
    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        requires_grad: Sequence[bool],
        targets: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """Runs F. `requires_grad` is ignored; it is fixed when the stage is recorded."""
        slot = self._used[micro_batch] = self._free.pop()
        for static, value in zip([*slot.inputs, *slot.targets], [*inputs, *targets], strict=True):
            static.copy_(value)
        slot.replays[FORWARD]()
        return tuple(output.clone() for output in slot.outputs)

    @torch.no_grad()
    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """Runs I, or B if the stage is not split."""
        slot = self._used[micro_batch]
        for static, gradient in zip(slot.gradients, gradients, strict=True):
            if static is not None and gradient is None:
                static.zero_()
            elif static is not None and gradient is not None:
                static.copy_(gradient)
        slot.replays[INPUT]()
        if not self.splits:
            self._free.append(self._used.pop(micro_batch))
        return {
            position: None if gradient is None else gradient.clone()
            for position, gradient in slot.input_gradients.items()
        }

    def backward_weight(self, micro_batch: int) -> None:
        """Runs W, the last action of the micro-batch."""
        slot = self._used.pop(micro_batch)
        slot.replays[WEIGHT]()
        self._free.append(slot)

    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """Runs B."""
        input_gradients = self.backward_input(micro_batch, gradients)
        if self.splits:
            self.backward_weight(micro_batch)
        return input_gradients

    def close(self) -> None:
        """Drops the recordings; `.grad` stays."""
        self._slots, self._free, self._used = [], [], {}
        self._sums, self._to_add = [], []
        self._stage.close()
