"""How much of the communication is hidden behind computing, on merged intervals of one rank."""

from collections.abc import Iterable, Sequence

from stepgauge.spec.analysis import Overlap
from stepgauge.trace.attribution import Resolver, Work
from stepgauge.trace.events import Trace
from stepgauge.trace.intervals import Intervals, intersection, merged, total


def overlap(trace: Trace, works: Sequence[Work] | None = None) -> Overlap | None:
    """comm_comp_overlap = time in which both communicate and compute / time communicating, as
    Holistic Trace Analysis defines it, of what the profiled steps launched. Transfers and fills of
    the driver are neither, but for copies from GPU to GPU, which are communication. None for a
    trace without communication; `works` as the Resolver gives them, where they are there already.

    Of a trace without kernels: a host backend's transfers against the operations of the threads
    that step.
    """
    works = list(Resolver(trace).work()) if works is None else works
    communication, computation = busy(trace, works)
    if not communication:
        return None
    hidden = total(intersection(communication, computation))
    return Overlap(
        rank=trace.rank,
        steps=len({work.step for work in works}),
        communication_us=total(communication),
        computation_us=total(computation),
        hidden_us=hidden,
        exposed_us=total(communication) - hidden,
    )


def busy(trace: Trace, works: Iterable[Work]) -> tuple[Intervals, Intervals]:
    """When the rank communicated, and when it computed."""
    if not trace.on_device:
        # What is no operation, Python and waiting, does not count as computing.
        return merged((call.start, call.end) for call in trace.transfers), merged(
            (w.start, w.end) for w in works if w.kind not in ("communication", "host")
        )
    communication: Intervals = []
    computation: Intervals = []
    for work in works:
        if work.kind == "communication":
            communication.append((work.start, work.end))
        elif not work.by_driver:
            computation.append((work.start, work.end))
    return merged(communication), merged(computation)
