"""Runs the schedules of torch.distributed.pipelining on the same stages, with the interface of
`Pipeline`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn

SCHEDULES: Mapping[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "izb": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


class _InContext(nn.Module):
    """Runs a module's forward inside a context manager, such as autocast."""

    def __init__(self, module: nn.Module, context: Callable[[], Any]):
        super().__init__()
        self.module, self._context = module, context

    def forward(self, *inputs: Tensor) -> Tensor:
        with self._context():
            return self.module(*inputs)


class TorchPipeline:
    """One of torch's schedules over the stages of this rank."""

    def __init__(
        self,
        name: str,
        modules: Mapping[int, nn.Module],
        *,
        num_stages: int,
        micro_batches: int,
        device: torch.device,
        loss: Callable[..., Tensor],
        context: Callable[[], Any],
    ):
        self._has_first, self._has_last = 0 in modules, num_stages - 1 in modules
        stages = [
            pipelining.PipelineStage(_InContext(module, context), number, num_stages, device)
            for number, module in modules.items()
        ]
        schedule_class = SCHEDULES[name]
        single = issubclass(schedule_class, pipelining.schedules.PipelineScheduleSingle)
        own_stages = stages[0] if single else stages
        self._schedule = schedule_class(own_stages, micro_batches, loss_fn=loss)
        parameters = inspect.signature(self._schedule.step).parameters
        # Newer versions of torch keep the outputs of all micro-batches by default.
        self._settings = {"return_outputs": False} if "return_outputs" in parameters else {}

    def step(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor | None:
        losses: list[Tensor] = []
        loss_arguments = {"target": targets[0], "losses": losses} if self._has_last else {}
        stage_inputs = inputs if self._has_first else ()
        self._schedule.step(*stage_inputs, **loss_arguments, **self._settings)
        return torch.stack(losses).mean() if losses else None

    def close(self) -> None:
        """Does nothing: there is nothing to release."""
