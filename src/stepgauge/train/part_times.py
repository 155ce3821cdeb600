"""Times the parts of a network on this machine, so that a pipeline can be cut into equal stages."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.stages import PartTimes, num_parts

WARMUP, REPEATS = 2, 5
Context = Callable[[], contextlib.AbstractContextManager[Any]]


def part_times(
    model: ModelSpec | BertSpec,
    build: Callable[[ModelSpec | BertSpec, range], Callable[..., Tensor]],
    *,
    inputs: tuple[Tensor, ...],
    targets: Tensor,
    device: torch.device,
    context: Context,
) -> PartTimes:
    """Returns the times of the embeddings, of each half of a block and of the head, averaged over all
    ranks, which must all call it. They are measured in a network with one block.

    Layers are timed whole even with a tensor axis, because it divides all of them alike.

    build    builds a stage of a network from its parts; the last one takes targets after its input
    inputs   of the first stage for a micro-batch
    context  entered around every forward, such as autocast
    """
    one_block, times, end = dataclasses.replace(model, num_layers=1), [], num_parts(1)
    parts = [range(part, part + 1) for part in range(end)]
    if (
        getattr(model, "block", "") == "parallel"
    ):  # cannot be run by halves: each gets half its time
        parts[1:3] = [range(1, 3)]
    for part in parts:
        stage = build(one_block, part)
        inputs = (*inputs, targets) if part.stop == end else inputs
        output, ms = forward_and_backward(stage, inputs, device=device, context=context)
        inputs = (output.detach().requires_grad_(),)
        times += [ms / len(part)] * len(part)
    return mean_over_ranks(PartTimes(*times))


def forward_and_backward(
    module: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    *,
    device: torch.device,
    context: Context,
) -> tuple[Tensor, float]:
    """Returns the module's output, and the median ms of forward and backward over a few runs.
    Gradients accumulate over the runs, as in a pipeline's step.
    """
    times = []
    for _ in range(WARMUP + REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        with context():
            output = module(*inputs)
        output.backward(torch.ones_like(output))
        _synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return output, statistics.median(times[WARMUP:])


def mean_over_ranks(times: PartTimes) -> PartTimes:
    """Returns the mean over all ranks, the same on each."""
    times_of_ranks = gathered_objects(times)
    return PartTimes(*map(statistics.fmean, zip(*times_of_ranks, strict=True)))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
