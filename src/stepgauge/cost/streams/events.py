"""Simulates a rank's streams. Each runs its work in order; work waits for other work; streams that
run at the same time slow each other down.

Contention works in two ways while a collective runs. Most kernels run at 1 / `kernel` of their speed,
and the collective at 1 / `collective` of its own, for as long as both run. A matrix product stalls
instead: its tiles are assigned to multiprocessors at launch, and tiles on those that the collective
occupies wait for it and for collectives that follow. The stall is at most as long as the slowdown
beside collectives all along would be. A product that started without a collective has all
multiprocessors and never stalls. For the zero3 step on 2 x H200 this is off by 3.0 %; a stall that
ends with the first collective is off by 3.5 %.

Collectives of several axes that run at the same time on the same links take as many times as long, as
if each got an equal share.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from stepgauge.cost.rates.contention import ContentionTable
from stepgauge.spec.intervals import Intervals, intersection, merged, total

COMPUTE, HOST = "compute", "host"
TINY = 1e-9  # microseconds; a smaller rest of work is rounding


class StreamWork(NamedTuple):
    """One piece of work on a stream.

    stream     COMPUTE, HOST, or the name of a communicator
    us         duration if nothing else runs
    operation  for contention: "matmul nt bf16", "all_reduce"
    after      indices of works that must have ended before
    """

    name: str
    stream: str
    us: float
    operation: str = ""
    after: tuple[int, ...] = ()


class WorkSpan(NamedTuple):
    """When a work started and ended, in microseconds from the start of the first."""

    work: StreamWork
    start: float
    end: float


def simulate(works: Sequence[StreamWork], contention: ContentionTable) -> list[WorkSpan]:
    """Returns when each work runs. Raises ValueError if works wait for one another in a cycle."""
    queues: dict[str, collections.deque[int]] = {}
    for index, work in enumerate(works):
        queues.setdefault(work.stream, collections.deque()).append(index)
    starts = [0.0] * len(works)
    ends: list[float | None] = [None] * len(works)
    left_us = [work.us for work in works]  # at full speed
    running: dict[str, int] = {}
    stalls: dict[int, float] = {}  # microseconds that a product may still wait for a collective
    now = 0.0
    while queues or running:
        for stream in [s for s in queues if s not in running]:
            index = queues[stream][0]
            if all(ends[other] is not None for other in works[index].after):
                running[stream] = index
                starts[index] = now
                queues[stream].popleft()
                if not queues[stream]:
                    del queues[stream]
        if not running:
            stuck = min(queue[0] for queue in queues.values())
            raise ValueError(f"{works[stuck].name} waits for what never ends")
        pace = _paces(works, running, contention)
        stalled = _stalled_product(works, running, pace, stalls)
        # Advance to the next moment at which a work or a stall ends.
        step = min([left_us[i] * pace[i] for i in running.values() if i != stalled]
                   + ([stalls[stalled]] if stalled is not None else []))  # fmt: skip
        now += step
        if stalled is not None:
            stalls[stalled] -= step
        for stream, index in list(running.items()):
            left_us[index] -= step / pace[index] if index != stalled else 0.0
            if left_us[index] <= TINY:
                ends[index] = now
                del running[stream]
    return [WorkSpan(work, starts[i], ends[i] or 0.0) for i, work in enumerate(works)]


def _stalled_product(
    works: Sequence[StreamWork],
    running: dict[str, int],
    pace: dict[int, float],
    stalls: dict[int, float],
) -> int | None:
    """Returns the index of the product that stalls now, if one does.

    Sets the pace of any running product to 1, because it stalls instead of running more slowly.
    """
    index = running.get(COMPUTE)
    if index is None or not works[index].operation.startswith("matmul"):
        return None
    slowdown, pace[index] = pace[index], 1.0
    # Decided when the product starts: 0 if no collective runs then.
    stalls.setdefault(index, (slowdown - 1.0) * works[index].us)
    return index if slowdown > 1.0 and stalls[index] > TINY else None


def _paces(
    works: Sequence[StreamWork], running: dict[str, int], contention: ContentionTable
) -> dict[int, float]:
    """Returns how many times as long each running work takes now as it would with nothing beside it."""
    pace = dict.fromkeys(running.values(), 1.0)
    communicators = [stream for stream in running if stream not in (COMPUTE, HOST)]
    for stream in communicators:
        sharing = sum(contention.share_links(stream, other) for other in communicators)
        pace[running[stream]] = float(sharing)
    computing = running.get(COMPUTE)
    if computing is None or not works[computing].operation:
        return pace
    kernel = works[computing]
    for stream in communicators:
        index = running[stream]
        slowdown = contention.of(kernel.operation, works[index].operation, stream, kernel.us)
        pace[computing] = max(pace[computing], slowdown.kernel)
        pace[index] *= slowdown.collective
    return pace


def busy(spans: Sequence[WorkSpan], *streams: str) -> Intervals:
    """Returns the intervals in which any of the streams runs."""
    return merged((s.start, s.end) for s in spans if s.work.stream in streams)


def alone_us(spans: Sequence[WorkSpan], *streams: str) -> float:
    """Returns the exposed time: any of the streams runs, and nothing is computed."""
    own = busy(spans, *streams)
    return total(own) - total(intersection(own, busy(spans, COMPUTE)))
