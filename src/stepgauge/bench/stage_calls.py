"""Forward and backward calls of one pipeline stage, without any other rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.step import Batch, on_device
from stepgauge.spec.plan.pipeline.action import BACKWARD, FORWARD, INPUT, WEIGHT


def stage_calls(
    pipeline: Pipeline, stage: int, inputs: Batch, targets: Batch = ()
) -> dict[str, Callable[[int], Any]]:
    """Returns the stage's calls by action kind. Each takes the number of a micro-batch.

    Call this after the pipeline's first step, with that step's batch. Run all micro-batches of one
    kind before those of the next kind.

    Inputs and gradients that neighbouring stages would send are noise: on zeros a GPU draws less
    power and runs faster.
    """
    run, metas, device = pipeline.stages[stage], pipeline.metas[stage], pipeline.device
    num_chunks = pipeline.schedule.num_micro_batches
    if stage == 0:
        received = on_device([tensor.chunk(num_chunks)[0] for tensor in inputs], device)
    else:
        received = [meta.noise(device) for meta in metas]
    gradients: list[Tensor | None]
    if stage == pipeline.schedule.num_stages - 1:
        stage_targets = on_device([tensor.chunk(num_chunks)[0] for tensor in targets], device)
        gradients = [torch.ones((), device=device)]
    else:
        stage_targets = []
        sent = pipeline.metas[stage + 1]
        gradients = [meta.noise(device) if meta.has_gradient else None for meta in sent]
    needs_gradient = [meta.requires_grad for meta in metas]
    calls: dict[str, Callable[[int], Any]] = {
        FORWARD: lambda k: run.forward(k, received, needs_gradient, stage_targets)
    }
    if not run.splits:
        return calls | {BACKWARD: lambda k: run.backward(k, gradients)}
    return calls | {INPUT: lambda k: run.backward_input(k, gradients), WEIGHT: run.backward_weight}
