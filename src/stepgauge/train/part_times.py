"""What the parts of a network take on this machine: by it the stages of a pipeline are cut."""

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
    """Of the embeddings, the halves of a block and the head, from a network of one block. Whole
    layers: of a tensor axis each rank has as large a part of them all. The same on all ranks, which
    must all call it.

    build    a stage of a network, by its parts; the last one takes targets after its input
    inputs   what the first stage takes of a micro-batch
    context  around every forward, such as autocast
    """
    short, found, end = dataclasses.replace(model, num_layers=1), [], num_parts(1)
    parts = [range(part, part + 1) for part in range(end)]
    if getattr(model, "block", "") == "parallel":  # its block has no halves: each is half of it
        parts[1:3] = [range(1, 3)]
    for part in parts:
        stage = build(short, part)
        inputs = (*inputs, targets) if part.stop == end else inputs
        output, ms = forward_and_backward(stage, inputs, device=device, context=context)
        inputs = (output.detach().requires_grad_(),)
        found += [ms / len(part)] * len(part)
    return mean_over_ranks(PartTimes(*found))


def forward_and_backward(
    module: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    *,
    device: torch.device,
    context: Context,
) -> tuple[Tensor, float]:
    """What the module gives, and the median ms of a few runs, whose gradients add up as in the step
    of a pipeline.
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
    """The mean over all ranks, the same on each."""
    given = gathered_objects(times)
    return PartTimes(*map(statistics.fmean, zip(*given, strict=True)))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
