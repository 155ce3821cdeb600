"""How much of the communication is hidden behind computing, on merged intervals of one rank."""

from stepgauge.spec.analysis import Overlap
from stepgauge.trace import kinds
from stepgauge.trace.attribution import Resolver
from stepgauge.trace.events import Trace
from stepgauge.trace.intervals import Intervals, intersection, merged, total
from stepgauge.trace.read import TraceError


def overlap(trace: Trace) -> Overlap | None:
    """comm_comp_overlap = time in which both communicate and compute / time communicating, as
    Holistic Trace Analysis defines it; transfers and fills of the driver are neither, but for
    copies from GPU to GPU, which are communication. None for a trace without communication.

    Of a trace without kernels: a host backend's transfers against the operations of the threads
    that step.
    """
    communication, computation = busy(trace)
    if not communication:
        return None
    hidden = total(intersection(communication, computation))
    return Overlap(
        rank=trace.rank,
        communication_us=total(communication),
        computation_us=total(computation),
        hidden_us=hidden,
        exposed_us=total(communication) - hidden,
    )


def required_overlap(trace: Trace) -> Overlap:
    """Raises TraceError for a trace without communication: its ratio would be none."""
    found = overlap(trace)
    if found is None:
        raise TraceError(f"{trace.path} has no communication, so there is no overlap to measure")
    return found


def busy(trace: Trace) -> tuple[Intervals, Intervals]:
    """When the rank communicated, and when it computed."""
    if not trace.on_device:
        # What is no operation, Python and waiting, does not count as computing.
        works = (w for w in Resolver(trace).work() if w.kind not in ("communication", "host"))
        return merged((call.start, call.end) for call in trace.transfers), merged(
            (w.start, w.end) for w in works
        )
    communication: Intervals = []
    computation: Intervals = []
    for kernel in trace.kernels:
        if kinds.of_kernel(kernel.name, kernel.category, "", False).kind == "communication":
            communication.append((kernel.start, kernel.end))
        elif kernel.category != "copy":
            computation.append((kernel.start, kernel.end))
    return merged(communication), merged(computation)
