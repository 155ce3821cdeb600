"""Measures how many of a measurement's cores other processes used.

If another process uses one of the cores, threads that synchronize wait for a time slice of the
scheduler at every call: a product of 64 x 64 x 64 takes 16 ms instead of 11 µs. All calls are equally
slow, so the spread of the times does not reveal it.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
TICK_S = 0.01  # resolution of the counters in /proc/stat
BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal, as numbered in proc(5)


class Reading(NamedTuple):
    """Counters at one moment, in seconds.

    wall_s  the clock
    busy_s  all work on the cores that this process may use
    own_s   work of this process
    cores   number of cores that this process may use
    """

    wall_s: float
    busy_s: float
    own_s: float
    cores: int


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
    return Reading(time.monotonic(), ticks * TICK_S, time.process_time(), len(usable))


def missed_cores(spans: Sequence[Span], threads: int) -> float:
    """Returns how many of the needed cores other processes used, on average over the measurement.

    spans    the readings of each measuring process, over the same time on one machine
    threads  number of threads, and so of needed cores, of each measuring process
    """
    before, after = spans[0]
    wall_s = max(TICK_S, after.wall_s - before.wall_s)
    own_s = sum(end.own_s - start.own_s for start, end in spans)
    others = (after.busy_s - before.busy_s - own_s) / wall_s
    spare = max(0, after.cores - threads * len(spans))
    uncertainty = 2 * TICK_S * after.cores / wall_s
    return max(0.0, others - spare - uncertainty)
