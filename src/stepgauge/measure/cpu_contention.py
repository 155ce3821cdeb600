"""What other processes took of the cores that a measurement ran on.

Where one core is taken, threads that wait for one another wait for a turn of the scheduler at each
call, every call alike: a product of 64 x 64 x 64 takes 16 ms in place of 11 µs, and no spread tells.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
TICK_S = 0.01  # of the counters of /proc/stat
BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal, as proc(5) numbers them


class Reading(NamedTuple):
    """Seconds so far: of the clock, of all work on the cores that this process may use, and of its
    own; and how many cores these are.
    """

    wall_s: float
    busy_s: float
    own_s: float
    cores: int


Span = tuple[Reading, Reading]  # before and after what was measured


def reading() -> Reading | None:
    """None where the system does not tell (it is Linux that does)."""
    try:
        usable = os.sched_getaffinity(0)
        lines = [line.split() for line in STAT.read_text().splitlines()]
    except (AttributeError, OSError):
        return None
    names = {f"cpu{number}" for number in usable}
    ticks = sum(int(line[1 + field]) for line in lines if line[0] in names for field in BUSY)
    return Reading(time.monotonic(), ticks * TICK_S, time.process_time(), len(usable))


def missed_cores(spans: Sequence[Span], threads: int) -> float:
    """How many cores others had of those that processes with so many threads each needed, on
    average while they measured.

    spans  of each process, over the same time on one machine
    """
    before, after = spans[0]
    wall_s = max(TICK_S, after.wall_s - before.wall_s)
    own_s = sum(end.own_s - start.own_s for start, end in spans)
    others = (after.busy_s - before.busy_s - own_s) / wall_s
    spare = max(0, after.cores - threads * len(spans))
    unsure = 2 * TICK_S * after.cores / wall_s
    return max(0.0, others - spare - unsure)
