"""How the host fed the device: launch calls, delays, queues, and the driver's copies."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from stepgauge.spec.analysis import CopyRow, StreamRow
from stepgauge.trace.attribution import Work
from stepgauge.trace.idle import HOST_BOUND, SYNCHRONISED, Moment


def streams(works: Sequence[Work], moments: Iterable[Moment]) -> list[StreamRow]:
    """One row a stream, the one with most launches first; kernels without a launch are left out."""
    late: dict[tuple[int, int], int] = defaultdict(int)
    for moment in moments:
        late[moment.work.stream] += moment.new and moment.reason in (HOST_BOUND, SYNCHRONISED)
    by_stream: dict[tuple[int, int], list[Work]] = defaultdict(list)
    for work in works:
        if work.launched is not None:
            by_stream[work.stream].append(work)
    several = len({device for device, _ in by_stream}) > 1
    rows = []
    for (device, stream), mine in by_stream.items():
        launches = {work.launched for work in mine if work.launched}
        delays = [max(0.0, work.start - work.launched[1]) for work in mine if work.launched]
        mean, most = _queue(mine)
        rows.append(
            StreamRow(
                stream=f"{device}:{stream}" if several else str(stream),
                launches=len(launches),
                call_us=sum(end - start for start, end in launches),
                delay_us=[statistics.median(delays), max(delays)],
                queue=[mean, most],
                late=late[device, stream],
            )
        )
    return sorted(rows, key=lambda row: -row.launches)


def _queue(works: Sequence[Work]) -> tuple[float, int]:
    """Mean over time and maximum of what was launched and had not begun.

    A graph's kernels count as one until its first has begun: the device feeds itself the others.
    """
    first: dict[tuple[float, float], float] = {}
    for work in works:
        if work.launched is not None:
            first[work.launched] = min(work.start, first.get(work.launched, work.start))
    events = sorted(
        itertools.chain(
            ((launch[0], 1) for launch in first),
            ((max(start, launch[0]), -1) for launch, start in first.items()),
        ),
        key=lambda event: (event[0], -event[1]),
    )
    waiting = most = 0
    area, now = 0.0, events[0][0]
    for time, change in events:
        area += waiting * (time - now)
        waiting, now = waiting + change, time
        most = max(most, waiting)
    length = max(work.end for work in works) - events[0][0]
    return (area / length if length else 0.0), most


def copies(works: Iterable[Work]) -> list[CopyRow]:
    """The driver's transfers and fills, by name."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
    for work in works:
        if work.by_driver:
            entry = sums[work.name]
            entry[0] += 1
            entry[1] += work.us
            entry[2] += work.bytes
    rows = [CopyRow(name=n, calls=int(c), us=us, bytes=int(b)) for n, (c, us, b) in sums.items()]
    return sorted(rows, key=lambda row: -row.us)
