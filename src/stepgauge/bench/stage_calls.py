"""What a stage of a pipeline does for a micro-batch, without any other rank."""

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
    """By kind, to be called with micro-batches, one kind after the other; after the pipeline's first
    step, with its batch.

    Where the stages beside would have written lies noise: on zeros a GPU draws less power and runs
    faster.
    """
    run, metas, device = pipeline.stages[stage], pipeline.metas[stage], pipeline.device
    parts = pipeline.schedule.num_micro_batches
    if stage == 0:
        given = on_device([tensor.chunk(parts)[0] for tensor in inputs], device)
    else:
        given = [meta.noise(device) for meta in metas]
    gradients: list[Tensor | None]
    if stage == pipeline.schedule.num_stages - 1:
        answers = on_device([tensor.chunk(parts)[0] for tensor in targets], device)
        gradients = [torch.ones((), device=device)]
    else:
        answers = []
        after = pipeline.metas[stage + 1]
        gradients = [meta.noise(device) if meta.has_gradient else None for meta in after]
    trained = [meta.is_trained for meta in metas]
    calls: dict[str, Callable[[int], Any]] = {
        FORWARD: lambda k: run.forward(k, given, trained, answers)
    }
    if not run.splits:
        return calls | {BACKWARD: lambda k: run.backward(k, gradients)}
    return calls | {INPUT: lambda k: run.backward_input(k, gradients), WEIGHT: run.backward_weight}
