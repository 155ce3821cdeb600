"""Forward, backward and communication of a step as one CUDA graph, for steps whose kernels run faster
than the host launches them.

The wrapper's hooks run while the graph is recorded, so NCCL's collectives are captured where backward
completes their buckets, on NCCL's own stream. A replay runs no Python code of the module and no hook.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.counted_mean import weighted
from stepgauge.parallel.training import Groups, OptimizerClass, Parallel, Parallelise
from stepgauge.parallel.trial import trial
from stepgauge.runtime.recording import WARM_UPS, Call, Recorder, parameter_locations

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class GraphedGradients:
    """Called as `(batch, 1)`, returns the loss and leaves the mean gradients in `.grad`. The first
    call, which all ranks must make, records the graph; later batches must have the same shapes.

    The next call overwrites `.grad`, which is memory of the graph: set it to None between calls, as
    `zero_grad` does. The loss is `module(*batch)`. Whatever the module does in Python (shapes,
    branches, which parameters are trained) stays as it was recorded. Raises RuntimeError if a `.grad`
    is not None, and if weights have moved or their requires_grad has changed; ValueError for a batch
    of other shapes; TypeError if the module does not return the loss.

    context  entered around the module's forward, such as autocast
    around   entered around forward and backward
    weight   called with the batch, returns the weight of its mean loss on this rank in the mean over
             ranks; part of the graph. None: 1
    """

    def __init__(
        self,
        module: nn.Module,
        recorder: Recorder,
        context: Context = contextlib.nullcontext,
        *,
        around: Context = contextlib.nullcontext,
        weight: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ):
        self.module, self._recorder = module, recorder
        self._context, self._around, self._weight = context, around, weight
        self._replay: Call | None = None
        self._batch: list[Tensor] = []  # the graph's input
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._loss = torch.zeros(())

    def __call__(self, batch: Sequence[Tensor], batches: int) -> Tensor:
        if batches != 1:
            raise ValueError(f"the step accumulates {batches} batches; a recorded step has one")
        if any(parameter.grad is not None for parameter in self.module.parameters()):
            raise RuntimeError("a recorded step overwrites `.grad`: set it to None before")
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
        """Records the graph. Weights, buffers and random state stay as they were."""
        self._batch = [part.clone() for part in batch]
        with trial(self.module, self._batch):
            for _ in range(WARM_UPS):
                self._recorder.warm_up(self._run)
                self._forget_gradients()
            (self._loss, gradients), self._replay = self._recorder.record(self._run, id(self))
        trained = [p for p in self.module.parameters() if p.grad is not None]
        self._gradients = list(zip(trained, gradients, strict=True))
        self._forget_gradients()
        self._recorded_at = parameter_locations(self.module)

    def _run(self) -> tuple[Tensor, list[Tensor]]:
        with self._around():
            weight = None if self._weight is None else self._weight(self._batch)
            with self._context():
                loss = self.module(*self._batch)
            if not isinstance(loss, Tensor) or loss.ndim:
                what = (
                    f"shape {tuple(loss.shape)}"
                    if isinstance(loss, Tensor)
                    else type(loss).__name__
                )
                raise TypeError(
                    f"the module returns {what}; a recorded step needs the loss, one number"
                )
            loss = loss if weight is None else weighted(loss, weight)
            loss.backward()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return loss.detach(), gradients

    def _forget_gradients(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def _require_as_recorded(self, batch: Sequence[Tensor]) -> None:
        given, recorded = ([tuple(x.shape) for x in each] for each in (batch, self._batch))
        if given != recorded:
            raise ValueError(f"the batch has shapes {given}; the recorded step has {recorded}")
        if parameter_locations(self.module) != self._recorded_at:
            raise RuntimeError(
                "weights have moved, or were frozen or unfrozen, since their step was recorded"
            )


def recorded(parallelise: Parallelise, recorder: Recorder, context: Context) -> Parallelise:
    """Returns `parallelise` changed so that forward and backward are recorded and replayed. The
    optimizer steps outside of the graph.
    """

    def build(module: nn.Module, groups: Groups, optimizer: OptimizerClass) -> Parallel:
        parallel = parallelise(module, groups, optimizer)
        # Communication is part of the graph: it can neither be skipped nor run separately.
        return dataclasses.replace(
            parallel,
            forward_backward=GraphedGradients(parallel.module, recorder, context),
            communicate=None,
            without_axis={},
        )

    return build
