"""Simulates a rank's streams. Each runs its work in order; work waits for other work; streams that
run at the same time slow each other down.

Contention works in two ways while a collective runs. Most kernels run at 1 / `kernel` of their speed,
and the collective at 1 / `collective` of its own, for as long as both run. A matrix product loses the
multiprocessors that the collective has when it starts: the tiles that were assigned to them wait. It runs at
BESIDE_COLLECTIVE of its speed while the collective does, but loses no more than the slowdown beside
collectives all along.

A product or attention on a GPU occupies all multiprocessors that are free when it starts. A collective that is
ready meanwhile waits until it ends, and then starts before the next kernel: in traces of five data parallel
layouts on 2 x H200, 305 collectives started while a product or attention ran, all of them in its last 35 %
(docs/log/2026-11-30-collectives-wait.md). Copies by copy engines need no multiprocessor.

Collectives of several axes that run at the same time on the same links take as many times as long, as
if each got an equal share.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from stepgauge.cost.rates.contention import ContentionTable
from stepgauge.spec.intervals import Intervals, intersection, merged, total

COMPUTE, HOST = "compute", "host"
# Speed of a product beside a collective that runs when it starts: in the same traces 0.5, the median of 210 products
# of over 0.5 ms beside over 0.1 ms of a collective that ended before them. Shorter rests cost relatively more.
BESIDE_COLLECTIVE = 0.5
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
    ends = [0.0] * len(works)
    ended: set[int] = set()
    left_us = [work.us for work in works]  # at full speed
    running: dict[str, int] = {}
    losses: dict[int, float] = {}  # microseconds that a product may still lose to collectives
    now = 0.0
    held: set[int] = set()  # collectives that are ready, and wait for multiprocessors
    while len(ended) < len(works):
        for index in _ready(works, queues, running, ended, held):
            if _finds_none_free(works, index, running, contention):
                held.add(index)
            else:
                stream = works[index].stream
                running[stream], starts[index] = index, now
                queues[stream].popleft()
        if not running:
            stuck = min(queue[0] for queue in queues.values() if queue)
            raise ValueError(f"{works[stuck].name} waits for what never ends")
        pace = _paces(works, running, contention)
        losing = _losing_product(works, running, pace, losses)
        # Advance to the next moment at which a work ends or a product has lost enough.
        step = min([left_us[index] * pace[index] for index in running.values()])
        if losing is not None:
            step = min(step, losses[losing] / (1 - BESIDE_COLLECTIVE))
            losses[losing] -= (1 - BESIDE_COLLECTIVE) * step
        now += step
        for stream, index in list(running.items()):
            left_us[index] -= step / pace[index]
            if left_us[index] <= TINY:
                ends[index] = now
                ended.add(index)
                del running[stream]
    return [WorkSpan(*span) for span in zip(works, starts, ends, strict=True)]


def _ready(
    works: Sequence[StreamWork],
    queues: dict[str, collections.deque[int]],
    running: dict[str, int],
    ended: set[int],
    held: set[int],
) -> list[int]:
    """Returns the next work of each idle stream, if what it waits for has ended, those in `held` first."""
    heads = [queue[0] for stream, queue in queues.items() if queue and stream not in running]
    ready = [index for index in heads if ended.issuperset(works[index].after)]
    if len(ready) > 1:
        ready.sort(key=lambda index: index not in held)
    return ready


def _finds_none_free(
    works: Sequence[StreamWork], index: int, running: dict[str, int], contention: ContentionTable
) -> bool:
    """Returns True for a collective while a kernel runs that has all multiprocessors."""
    computing = running.get(COMPUTE)
    if computing is None or works[index].stream in (COMPUTE, HOST):
        return False
    return contention.occupies(works[computing].operation, works[index].operation)


def _losing_product(
    works: Sequence[StreamWork],
    running: dict[str, int],
    pace: dict[int, float],
    losses: dict[int, float],
) -> int | None:
    """Returns the index of the product that is slowed down now, if one is. Sets the pace of any running
    product.
    """
    index = running.get(COMPUTE)
    if index is None or not works[index].operation.startswith("matmul"):
        return None
    slowdown, pace[index] = pace[index], 1.0
    # Decided when the product starts: 0 if no collective runs then.
    losses.setdefault(index, (slowdown - 1.0) * works[index].us)
    if slowdown == 1.0 or losses[index] <= TINY:
        return None
    pace[index] = 1 / BESIDE_COLLECTIVE
    return index


def _paces(
    works: Sequence[StreamWork], running: dict[str, int], contention: ContentionTable
) -> dict[int, float]:
    """Returns how many times as long each running work takes now as it would with nothing beside it."""
    pace = dict.fromkeys(running.values(), 1.0)
    communicators = [stream for stream in running if stream not in (COMPUTE, HOST)]
    if not communicators:
        return pace
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
