"""A rank's streams as events: each runs its work in order, work waits for what it reads, and what
runs beside one another slows one another down.

Contention is a rate: while a collective runs, computing goes on at 1 / kernel of its pace and the
collective at 1 / collective of its own, and only for as long as both run. Of a product it is a
stall: its tiles are dealt to the multiprocessors when it is launched, and those of the ones that
the collective has wait for it and for those that follow, for at most as long as the product loses
beside collectives all along: of 2 H200s' zero3 step 3.0 % are missed so, and 3.5 % where the wait
ends with the first collective. A product that began beside none has all multiprocessors.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from stepgauge.cost.rates.contention import Slowdown

COMPUTE, HOST = "compute", "host"
TINY = 1e-9  # microseconds: what rounding leaves of a work


class StreamWork(NamedTuple):
    """Something that a stream runs.

    stream     COMPUTE, HOST, or the name of a communicator
    us         that it takes with nothing beside it
    operation  what contention goes by: "matmul nt bf16", "all_reduce"
    after      works, by their places, that must have ended
    """

    name: str
    stream: str
    us: float
    operation: str = ""
    after: tuple[int, ...] = ()


class Ran(NamedTuple):
    """When a work began and ended, in microseconds from the begin of the first."""

    work: StreamWork
    start: float
    end: float


class Contending(Protocol):
    def of(self, operation: str, collective: str, axis: str, us: float = ...) -> Slowdown: ...


def simulate(works: Sequence[StreamWork], contention: Contending) -> list[Ran]:
    """When each work runs. Raises ValueError where works wait for one another in a circle."""
    queues: dict[str, collections.deque[int]] = {}
    for place, work in enumerate(works):
        queues.setdefault(work.stream, collections.deque()).append(place)
    starts = [0.0] * len(works)
    ends: list[float | None] = [None] * len(works)
    left = [work.us for work in works]
    running: dict[str, int] = {}
    stalls: dict[int, float] = {}  # microseconds that a product may still wait for a collective
    now = 0.0
    while queues or running:
        for stream in [s for s in queues if s not in running]:
            place = queues[stream][0]
            if all(ends[other] is not None for other in works[place].after):
                running[stream] = place
                starts[place] = now
                queues[stream].popleft()
                if not queues[stream]:
                    del queues[stream]
        if not running:
            stuck = min(queue[0] for queue in queues.values())
            raise ValueError(f"{works[stuck].name} waits for what never ends")
        pace = _paces(works, running, contention)
        stalled = _stalled(works, running, pace, stalls)
        step = min([left[p] * pace[p] for p in running.values() if p != stalled]
                   + ([stalls[stalled]] if stalled is not None else []))  # fmt: skip
        now += step
        if stalled is not None:
            stalls[stalled] -= step
        for stream, place in list(running.items()):
            left[place] -= step / pace[place] if place != stalled else 0.0
            if left[place] <= TINY:
                ends[place] = now
                del running[stream]
    return [Ran(work, starts[p], ends[p] or 0.0) for p, work in enumerate(works)]


def _stalled(
    works: Sequence[StreamWork],
    running: dict[str, int],
    pace: dict[int, float],
    stalls: dict[int, float],
) -> int | None:
    """The product that waits for a collective now; of any product the pace becomes its own."""
    place = running.get(COMPUTE)
    if place is None or not works[place].operation.startswith("matmul"):
        return None
    slowed, pace[place] = pace[place], 1.0
    stalls.setdefault(place, (slowed - 1.0) * works[place].us)  # 0 where it is alone when it begins
    return place if slowed > 1.0 and stalls[place] > TINY else None


def _paces(
    works: Sequence[StreamWork], running: dict[str, int], contention: Contending
) -> dict[int, float]:
    """How much longer than alone each running work takes now."""
    pace = dict.fromkeys(running.values(), 1.0)
    computing = running.get(COMPUTE)
    if computing is None or not works[computing].operation:
        return pace
    for stream, place in running.items():
        if stream in (COMPUTE, HOST):
            continue
        kernel = works[computing]
        slowed = contention.of(kernel.operation, works[place].operation, stream, kernel.us)
        pace[computing] = max(pace[computing], slowed.kernel)
        pace[place] = slowed.collective
    return pace


def busy(ran: Sequence[Ran], *streams: str) -> list[tuple[float, float]]:
    """When any of the streams runs something: intervals in order, none touching the next."""
    spans = sorted((r.start, r.end) for r in ran if r.work.stream in streams and r.end > r.start)
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def alone_us(ran: Sequence[Ran], *streams: str) -> float:
    """Microseconds in which any of the streams runs and computing does not: what is exposed."""
    own, computing = busy(ran, *streams), collections.deque(busy(ran, COMPUTE))
    beside = 0.0
    for start, end in own:
        while computing and computing[0][0] < end:
            first, last = computing[0]
            beside += max(0.0, min(end, last) - max(start, first))
            if last > end:  # it goes on beside the next
                break
            computing.popleft()
    return sum(end - start for start, end in own) - beside
