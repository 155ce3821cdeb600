"""Forward, backward and the averaging of gradients of a data-parallel step, recorded once as one CUDA
graph: a small model's step is then no longer the host's launches.

The wrapper's hooks run while the graph is recorded, so that NCCL's collectives are in it where backward
has their bucket, on NCCL's own stream. A replay runs no Python of the module and no hook.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.training import Groups, OptimizerClass, Parallel, Parallelise
from stepgauge.parallel.trial import trial
from stepgauge.runtime.recording import WARM_UPS, Call, Recorder, places

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class GraphedGradients:
    """`(batch, 1)` gives the loss, and `.grad` the means. Recorded at the first call, which all ranks
    must make; then every batch has its shapes.

    `.grad` is memory of the graph, which the next call writes: set it to None between, as
    `zero_grad` does. The module's `module(*batch)` is its loss; what it does in Python, shapes,
    branches and which parameters are trained, stays as it was recorded. Raises RuntimeError for
    gradients of another pass, and for weights that have moved or were frozen; ValueError for
    another shape.
    """

    def __init__(
        self, module: nn.Module, recorder: Recorder, context: Context = contextlib.nullcontext
    ):
        self.module, self._recorder, self._context = module, recorder, context
        self._replay: Call | None = None
        self._batch: list[Tensor] = []
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._loss = torch.zeros(())

    def __call__(self, batch: Sequence[Tensor], batches: int) -> Tensor:
        if batches != 1:
            raise ValueError(f"{batches} batches add up; a recorded step has one")
        if any(parameter.grad is not None for parameter in self.module.parameters()):
            raise RuntimeError("a recorded step writes `.grad`: set it to None before")
        if self._replay is None:
            self._record(batch)
        assert self._replay is not None, "it has been recorded"
        self._require_as_recorded(batch)
        for static, given in zip(self._batch, batch, strict=True):
            static.copy_(given)
        self._replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss.clone()

    def _record(self, batch: Sequence[Tensor]) -> None:
        """Weights, buffers and random state stay as they were."""
        self._batch = [part.clone() for part in batch]
        with trial(self.module, self._batch):
            for _ in range(WARM_UPS):
                self._recorder.warm_up(self._run)
                self._forget()
            (self._loss, found), self._replay = self._recorder.record(self._run, id(self))
        trained = [p for p in self.module.parameters() if p.grad is not None]
        self._gradients = list(zip(trained, found, strict=True))
        self._forget()
        self._recorded_at = places(self.module)

    def _run(self) -> tuple[Tensor, list[Tensor]]:
        with self._context():
            loss = self.module(*self._batch)
        loss.backward()
        found = [p.grad for p in self.module.parameters() if p.grad is not None]
        return loss.detach(), found

    def _forget(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def _require_as_recorded(self, batch: Sequence[Tensor]) -> None:
        given, recorded = ([tuple(x.shape) for x in each] for each in (batch, self._batch))
        if given != recorded:
            raise ValueError(f"the batch has shapes {given}; the recorded step has {recorded}")
        if places(self.module) != self._recorded_at:
            raise RuntimeError("weights have moved, or were frozen, since their step was recorded")


def recorded(parallelise: Parallelise, recorder: Recorder, context: Context) -> Parallelise:
    """The way of spreading, whose steps are recorded and replayed; the optimizer steps after it."""

    def build(module: nn.Module, groups: Groups, optimizer: OptimizerClass) -> Parallel:
        parallel = parallelise(module, groups, optimizer)
        mixed = GraphedGradients(parallel.module, recorder, context)
        # communication is part of the recording: it is neither left out nor done alone
        return dataclasses.replace(parallel, mixed=mixed, communicate=None, without_axis={})

    return build
