"""The wrappers and schedules among which plan and tune choose."""

from collections.abc import Iterator, Sequence

from stepgauge.spec.layout import Layout

WRAPPERS = ("bucketed", "zero1", "zero2", "zero3")
SCHEDULES = ("1f1b", "zbv")
# Micro-batches per pipeline rank, the best first. More leave a smaller bubble.
MICRO_BATCHES_PER_RANK = (4, 2, 1)


def layouts_on(
    *,
    data: int,
    tensor: int,
    pipeline: int,
    context: int = 1,
    schedules: Sequence[str] = SCHEDULES,
) -> Iterator[Layout]:
    """Yields each wrapper with each schedule on these axes, with one micro-batch per pipeline rank."""
    for wrapper in WRAPPERS if data * context > 1 else ("none",):
        for schedule in schedules if pipeline > 1 else ("",):
            yield Layout(
                data=data, wrapper=wrapper, context=context, tensor=tensor, pipeline=pipeline,
                schedule=schedule, microbatches=pipeline,
            )  # fmt: skip
