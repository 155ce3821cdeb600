"""Measures how much of one rank's communication is hidden behind computation."""

from collections.abc import Iterable, Sequence

from stepgauge.spec.analysis import Overlap
from stepgauge.spec.intervals import Intervals, intersection, merged, total
from stepgauge.trace.attribution import Resolver, Work
from stepgauge.trace.events import Trace


def overlap(trace: Trace, works: Sequence[Work] | None = None) -> Overlap | None:
    """Returns the overlap of the profiled steps, or None for a trace without communication.

    As in Holistic Trace Analysis, the ratio is the time in which the rank both communicates and
    computes, divided by the time in which it communicates. Transfers and fills by the driver are
    neither, except copies between GPUs, which are communication. In a trace without kernels, the
    transfers of a host backend are compared with the operations of the threads that run steps.

    works  what the Resolver gives for the trace, if the caller has it already
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
    """Returns when the rank communicated, and when it computed."""
    if not trace.on_device:
        # Only operations count as computing, not Python or waiting.
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
