"""Measures how many of a measurement's cores other processes used.

If another process uses one of the cores, threads that synchronize wait for a time slice of the
scheduler at every call: a product of 64 x 64 x 64 takes 16 ms instead of 11 µs. All calls are equally
slow, so the spread of the times does not reveal it.
"""

import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from stepgauge.spec.disturbance import MISSED_CORES
from stepgauge.spec.record import Sample

STAT = Path("/proc/stat")
TICK_S = 0.01  # resolution of the counters in /proc/stat
BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal, as numbered in proc(5)


class Reading(NamedTuple):
    """Counters at one moment, in seconds.

    wall_s  the clock
    busy_s  all work on the cores that this process may use
    own_s   work of this process
    cores   number of cores that this process may use
    host    the machine
    """

    wall_s: float
    busy_s: float
    own_s: float
    cores: int
    host: str = ""


Span = tuple[Reading, Reading]  # before and after a measurement


def reading() -> Reading | None:
    """Reads the counters. Returns None on systems other than Linux, which do not have them."""
    try:
        usable = os.sched_getaffinity(0)
        lines = [line.split() for line in STAT.read_text().splitlines()]
    except (AttributeError, OSError):
        return None
    names = {f"cpu{number}" for number in usable}
    ticks = sum(int(line[1 + field]) for line in lines if line[0] in names for field in BUSY)
    busy_s, own_s = ticks * TICK_S, time.process_time()
    return Reading(time.monotonic(), busy_s, own_s, len(usable), platform.node())


def span_since(before: Reading | None) -> Span | None:
    """Returns the readings before and now; None on systems that do not have them."""
    after = reading()
    return (before, after) if before and after else None


def missed_metric(spans: Iterable[Span | None], threads: int) -> dict[str, Sample]:
    """Returns `missed_cores` as the metric of a record, rounded to what the counters resolve; none on
    systems without readings.
    """
    known = [span for span in spans if span is not None]
    if not known:
        return {}
    return {MISSED_CORES: Sample.exact(round(missed_cores(known, threads), 2), "cores")}


def missed_cores(spans: Sequence[Span], threads: int) -> float:
    """Returns how many of the needed cores other processes used, on average over the measurement, on the
    machine where that is most.

    spans    the readings of each measuring process, over the same time
    threads  number of threads, and so of needed cores, of each measuring process
    """
    hosts = dict.fromkeys(before.host for before, _ in spans)
    by_host = ([span for span in spans if span[0].host == host] for host in hosts)
    return max(_missed_on_host(own, threads) for own in by_host)


def _missed_on_host(spans: Sequence[Span], threads: int) -> float:
    before, after = spans[0]
    wall_s = max(TICK_S, after.wall_s - before.wall_s)
    own_s = sum(end.own_s - start.own_s for start, end in spans)
    others = (after.busy_s - before.busy_s - own_s) / wall_s
    spare = max(0, after.cores - threads * len(spans))
    uncertainty = 2 * TICK_S * after.cores / wall_s
    return max(0.0, others - spare - uncertainty)
