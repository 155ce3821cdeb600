"""What a pipeline holds beside what its stages hold alone: tensors that came from other ranks, or are
on their way there.
"""

from collections.abc import Callable, Sequence

from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.between import Meta
from stepgauge.spec.plan.pipeline import Channel
from stepgauge.spec.plan.pipeline.action import RECEIVES, SENDS
from stepgauge.spec.plan.pipeline.check import Held


def in_step(alone: Held, pipeline: Pipeline, stage: int) -> Held:
    """What a micro-batch of a stage holds in a step: also its own inputs until I or B, and until W
    the gradient of its outputs, a factor of its last layer's. A stage that is timed alone has one of
    each for all; a recorded one has memory for them in any step.
    """
    schedule, inputs, gradients = pipeline.schedule, 0, 0
    if stage > 0 and schedule.crosses(stage, stage - 1):
        inputs = _bytes(between(pipeline)[stage - 1])
    if stage < schedule.num_stages - 1 and schedule.crosses(stage, stage + 1):
        gradients = _bytes(_trained(between(pipeline)[stage]))
    return Held(alone.activations + inputs, alone.for_weights + gradients)


def between(pipeline: Pipeline) -> list[list[Meta]]:
    """What goes into each stage but the first, after the first step."""
    return [metas for stage, metas in sorted(pipeline.metas.items()) if stage > 0]


def levels(
    pipeline: Pipeline, level: Callable[[], float], run: Callable[[], object]
) -> list[float]:
    """What `level` gives at the start and the end of each computation of the step that `run` runs,
    of a pipeline that records.
    """
    clock = pipeline.clock
    assert clock is not None, "it records"
    clock.level = level
    try:
        run()
    finally:
        clock.level = None
    return clock.levels


def travelling_bytes(pipeline: Pipeline, rank: int) -> int:
    """Of each channel of a rank, the message that was sent last, or that is awaited next."""
    actions = pipeline.schedule.ranks[rank]
    channels = {each.channel for each in actions if each.kind in (*SENDS, *RECEIVES)}
    return sum(_bytes(_message(pipeline, channel)) for channel in channels)


def _message(pipeline: Pipeline, channel: Channel) -> Sequence[Meta]:
    if channel.sender < channel.receiver:
        return between(pipeline)[channel.sender]
    return _trained(between(pipeline)[channel.receiver])


def _trained(metas: Sequence[Meta]) -> list[Meta]:
    return [meta for meta in metas if meta.has_gradient]


def _bytes(metas: Sequence[Meta]) -> int:
    return sum(meta.shape.numel() * meta.dtype.itemsize for meta in metas)
