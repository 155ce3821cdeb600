"""Memory of a pipeline's tensors that are received from other ranks or sent to them. Stages that are
probed in isolation do not have it.
"""

import dataclasses
from collections.abc import Callable, Sequence

from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.interfaces import Meta
from stepgauge.spec.plan.pipeline import Channel
from stepgauge.spec.plan.pipeline.action import RECEIVES, SENDS
from stepgauge.spec.plan.pipeline.check import Held


def held_in_step(probed: Held, pipeline: Pipeline, stage: int) -> Held:
    """Returns the memory that a micro-batch of a stage holds in a step.

    It adds to the probed memory the micro-batch's inputs, held until I or B, and the gradient of its
    outputs, held until W, which multiplies it by the last layer's inputs. A probed stage uses the
    same input and gradient for all micro-batches. A stage in CUDA graphs needs no correction: its
    graphs always hold memory for both.
    """
    schedule, inputs, gradients = pipeline.schedule, 0, 0
    if stage > 0 and schedule.crosses(stage, stage - 1):
        inputs = _bytes(boundaries(pipeline)[stage - 1])
    if stage < schedule.num_stages - 1 and schedule.crosses(stage, stage + 1):
        gradients = _bytes(_with_gradient(boundaries(pipeline)[stage]))
    return dataclasses.replace(
        probed,
        activations=probed.activations + inputs,
        for_weights=probed.for_weights + gradients,
    )


def boundaries(pipeline: Pipeline) -> list[list[Meta]]:
    """Returns the tensors between each stage and the next. Call it after the first step."""
    return [metas for stage, metas in sorted(pipeline.metas.items()) if stage > 0]


def memory_during(
    step: Callable[[], object], pipeline: Pipeline, level: Callable[[], float]
) -> list[float]:
    """Runs a step and returns the memory at the start and the end of each of its computations.

    pipeline  must record its actions
    level     returns the memory at the moment
    """
    clock = pipeline.clock
    assert clock is not None, "the pipeline records"
    clock.level = level
    try:
        step()
    finally:
        clock.level = None
    return clock.levels


def message_bytes(pipeline: Pipeline, rank: int) -> int:
    """Returns the size of one message in each channel of the rank: the last one that was sent or the
    next one to be received.
    """
    actions = pipeline.schedule.ranks[rank]
    channels = {each.channel for each in actions if each.kind in (*SENDS, *RECEIVES)}
    return sum(_bytes(_message(pipeline, channel)) for channel in channels)


def _message(pipeline: Pipeline, channel: Channel) -> Sequence[Meta]:
    """Returns the tensors of a message: activations to a later stage, or gradients to an earlier one."""
    if channel.sender < channel.receiver:
        return boundaries(pipeline)[channel.sender]
    return _with_gradient(boundaries(pipeline)[channel.receiver])


def _with_gradient(metas: Sequence[Meta]) -> list[Meta]:
    return [meta for meta in metas if meta.has_gradient]


def _bytes(metas: Sequence[Meta]) -> int:
    return sum(meta.shape.numel() * meta.dtype.itemsize for meta in metas)
