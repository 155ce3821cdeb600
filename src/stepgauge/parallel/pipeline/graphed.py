"""A stage whose forward and backward are recorded once and replayed: few launches for the host.

A CUDA graph reads and writes the memory that it was recorded with. So a stage has a *slot* for each
micro-batch that is in flight at once: static inputs, targets and gradients that are written before
a replay, and a graph for each kind of action. The graphs of a slot share a memory pool, and run one
after the other as they were recorded; slots share nothing, so that their micro-batches may overlap.
What a replay gives is copied out, since a transfer may still read it when the slot is used again.

Gradients add up in tensors that stay where they are, and that `.grad` is while it was None.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.pipeline.between import Given, Meta
from stepgauge.parallel.pipeline.stage import Stage
from stepgauge.parallel.trial import trial
from stepgauge.runtime.recording import WARM_UPS, Call, Recorder, places
from stepgauge.spec.plan.pipeline.action import FORWARD, INPUT, WEIGHT


@dataclasses.dataclass
class Slot:
    """Where a micro-batch lies while it is in flight. `outputs` and `input_gradients` are written by
    replays, by kind; all else before them.
    """

    number: int
    inputs: list[Tensor]
    targets: list[Tensor]
    gradients: list[Tensor | None]
    outputs: tuple[Tensor, ...] = ()
    input_gradients: dict[int, Tensor | None] = dataclasses.field(default_factory=dict)
    replays: dict[str, Call] = dataclasses.field(default_factory=dict)


class GraphedStage:
    """A Stage with as many slots as micro-batches are in flight at once; the same calls.

    What a module does in Python is done once, when it is recorded: shapes, branches and parameters
    that are trained stay as they are. Hooks on parameters do not run.
    """

    def __init__(self, stage: Stage, recorder: Recorder, slots: int, device: torch.device):
        self.module, self.splits = stage.module, stage.splits
        self._stage, self._recorder, self._device = stage, recorder, device
        self.num_slots = slots
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._used: dict[int, Slot] = {}
        self._sums: list[tuple[nn.Parameter, Tensor]] = []
        self._apart: list[tuple[nn.Parameter, Tensor]] = []
        self._recorded_at: list[tuple[int, bool]] = []

    def prepare(
        self, inputs: Sequence[Tensor], trained: Sequence[bool], targets: Sequence[Tensor] = ()
    ) -> tuple[Given, list[Tensor]]:
        return self._stage.prepare(inputs, trained, targets)

    def evaluate(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        return self._stage.evaluate(inputs, targets)

    # -- recording -------------------------------------------------------------------------------

    def record(
        self, inputs: Sequence[Meta], outputs: Sequence[Meta], targets: Sequence[Tensor]
    ) -> None:
        """After `prepare`. Buffers, gradients and random state stay as they were."""
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
        trained = [meta.is_trained for meta in inputs]
        parameters = list(self.module.parameters())
        gradients = [parameter.grad for parameter in parameters]
        with trial(self.module, [*self._slots[0].inputs, *self._slots[0].targets]):
            for parameter in parameters:
                parameter.grad = None
            for _ in range(WARM_UPS):
                self._recorder.warm_up(lambda: self._run(self._slots[0], trained))
            self._sums = [
                (p, torch.zeros_like(p.grad, memory_format=torch.preserve_format))
                for p in parameters
                if p.grad is not None
            ]
            for parameter, total in self._sums:
                parameter.grad = total
            for slot in self._slots:
                self._record_slot(slot, trained)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._recorded_at = places(self.module)

    def _run(self, slot: Slot, trained: Sequence[bool]) -> None:
        self._stage.forward(slot.number, slot.inputs, trained, slot.targets)
        self._stage.backward(slot.number, slot.gradients)

    def _record_slot(self, slot: Slot, trained: Sequence[bool]) -> None:
        stage, number = self._stage, slot.number
        kinds: dict[str, Callable[[], Any]] = {
            FORWARD: lambda: stage.forward(number, slot.inputs, trained, slot.targets),
            INPUT: lambda: stage.backward(number, slot.gradients),
        }
        if self.splits:
            kinds[INPUT] = lambda: stage.backward_input(number, slot.gradients)
            kinds[WEIGHT] = lambda: stage.backward_weight(number)
        given = {}
        for kind, run in kinds.items():
            given[kind], slot.replays[kind] = self._recorder.record(run, (id(self), number))
        slot.outputs, slot.input_gradients = given[FORWARD], given[INPUT]

    # -- a step ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Makes `.grad` what the replays add to. One that somebody else made is added to by `finish`.

        Raises RuntimeError for weights that have moved since, or that are trained or frozen now.
        """
        if places(self.module) != self._recorded_at:
            raise RuntimeError(
                "weights have moved, or were frozen, since their stage was recorded as CUDA graphs; "
                "make a new pipeline, or one without graphs"
            )
        self._free, self._used = list(reversed(self._slots)), {}
        fresh = [(p, total) for p, total in self._sums if p.grad is not total]
        if fresh:
            torch._foreach_zero_([total for _, total in fresh])
        self._apart = [(p, total) for p, total in fresh if p.grad is not None]
        for parameter, total in fresh:
            if parameter.grad is None:
                parameter.grad = total

    @torch.no_grad()
    def finish(self) -> None:
        """After the last backward of a step, before anybody reads `.grad`."""
        for parameter, total in self._apart:
            assert parameter.grad is not None, "it had one when the step began"
            parameter.grad.add_(total)
        self._apart = []

    @torch.no_grad()
    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        trained: Sequence[bool],
        targets: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """F, as Stage has it; `trained` is as it was recorded."""
        slot = self._used[micro_batch] = self._free.pop()
        for static, given in zip([*slot.inputs, *slot.targets], [*inputs, *targets], strict=True):
            static.copy_(given)
        slot.replays[FORWARD]()
        return tuple(output.clone() for output in slot.outputs)

    @torch.no_grad()
    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """I, or B where the stage is not split."""
        slot = self._used[micro_batch]
        for static, given in zip(slot.gradients, gradients, strict=True):
            if static is not None and given is None:
                static.zero_()
            elif static is not None and given is not None:
                static.copy_(given)
        slot.replays[INPUT]()
        if not self.splits:
            self._free.append(self._used.pop(micro_batch))
        return {
            place: None if found is None else found.clone()
            for place, found in slot.input_gradients.items()
        }

    def backward_weight(self, micro_batch: int) -> None:
        """W."""
        slot = self._used.pop(micro_batch)
        slot.replays[WEIGHT]()
        self._free.append(slot)

    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """B."""
        found = self.backward_input(micro_batch, gradients)
        if self.splits:
            self.backward_weight(micro_batch)
        return found

    def close(self) -> None:
        """Drops what is recorded; `.grad` stays."""
        self._slots, self._free, self._used = [], [], {}
        self._sums, self._apart = [], []
        self._stage.close()
