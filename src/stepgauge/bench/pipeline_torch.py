"""torch.distributed.pipelining's own schedules on the same stages, behind the step that ours has."""

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
    """A module whose forward runs in a context."""

    def __init__(self, module: nn.Module, context: Callable[[], Any]):
        super().__init__()
        self.module, self._context = module, context

    def forward(self, *inputs: Tensor) -> Tensor:
        with self._context():
            return self.module(*inputs)


class TorchPipeline:
    """A schedule of torch's over the stages of this rank."""

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
        made = SCHEDULES[name]
        single = issubclass(made, pipelining.schedules.PipelineScheduleSingle)
        self._schedule = made(stages[0] if single else stages, micro_batches, loss_fn=loss)
        settings = inspect.signature(self._schedule.step).parameters
        # Newer versions keep the outputs of all micro-batches unless told not to.
        self._settings = {"return_outputs": False} if "return_outputs" in settings else {}

    def step(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor | None:
        losses: list[Tensor] = []
        answers = {"target": targets[0], "losses": losses} if self._has_last else {}
        self._schedule.step(*(inputs if self._has_first else ()), **answers, **self._settings)
        return torch.stack(losses).mean() if losses else None

    def close(self) -> None:
        """Nothing to give back."""
