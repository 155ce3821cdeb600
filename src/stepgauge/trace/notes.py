"""Warnings on a trace that a reader needs before trusting its figures, one sentence each."""

from collections.abc import Iterator, Sequence

from stepgauge.trace.attribution import Work
from stepgauge.trace.events import Trace

EARLY_US = 1.0  # a kernel that begins longer than this before its launch was timed by another clock


def notes(trace: Trace, works: Sequence[Work]) -> list[str]:
    """Returns the warnings. `works` are the pieces of work that are counted."""
    return [*_of_events(trace), *_of_launches(trace, works), *_of_steps(trace, works)]


def _of_events(trace: Trace) -> Iterator[str]:
    if trace.unknown:
        devices = ", ".join(f"{number:,} of {name}" for name, number in trace.unknown.items())
        only_host = "" if trace.on_device else " The figures are only of the host's operations."
        yield (
            f"The trace has events of devices that stepgauge does not know ({devices}). They are left "
            f"out.{only_host}"
        )
    elif trace.device and not trace.on_device:
        yield (
            f"The trace names a device ({trace.device}) but has none of its kernels. The figures are of "
            "the host's operations, which may only launch work. Also record ProfilerActivity.CUDA."
        )
    if trace.letters["B"]:
        yield (
            f"{trace.letters['B']:,} calls are written as pairs of begin and end (ph B and E). They are "
            "left out, because torch.profiler writes complete calls (ph X)."
        )
    if trace.without_duration:
        yield (
            f"{trace.without_duration:,} events have no duration or a negative one. They count as 0 µs."
        )
    if trace.repeated:
        yield f"{trace.repeated:,} kernels are repeated in the trace. Each counts once."


def _of_launches(trace: Trace, works: Sequence[Work]) -> Iterator[str]:
    if not trace.on_device:
        return
    without_launch = sum(not work.launched for work in works)
    if without_launch == len(works):
        yield (
            "No kernel has its launch in the trace, so operations, ranges, phases and reasons of idle "
            "time are unknown."
        )
    elif without_launch:
        yield (
            f"{without_launch:,} of {len(works):,} kernels and copies have no launch in the trace. They "
            "count in the step of the preceding kernel, and in no phase or range."
        )
    launches = [call.correlation for call in trace.calls("runtime") if call.correlation]
    if repeated := len(launches) - len(set(launches)):
        yield (
            f"{repeated:,} launches share their number (correlation) with another, as in a file that "
            "joins the traces of several processes. Kernels may be attributed to the wrong operations; "
            "analyse the trace of each process separately."
        )
    elif early := [
        us for us in (w.launched[0] - w.start for w in works if w.launched) if us > EARLY_US
    ]:
        yield (
            f"{len(early):,} kernels begin before their launch, by up to {max(early):,.0f} µs: the "
            "clocks of host and device differ. Do not trust lead-in, tail and the reasons of idle time; "
            "sums, busy and idle time use only the device's clock."
        )
    devices = sorted({work.stream[0] for work in works})
    if len(devices) > 1:
        yield (
            f"The trace has {len(devices)} devices ({', '.join(map(str, devices))}) on one time line: "
            "it is busy when any of them is, and idle when none is."
        )


def _of_steps(trace: Trace, works: Sequence[Work]) -> Iterator[str]:
    steps = len({work.step for work in works})
    if trace.marked and not trace.in_order:
        yield (
            "The steps' numbers decrease over time: a clock jumped, or the file holds several "
            "processes. Time between such steps is not counted."
        )
    if trace.marked and steps < len(trace.steps):
        yield (
            f"{len(trace.steps) - steps} of {len(trace.steps)} marked steps launched no work and are "
            "not counted."
        )
    if trace.on_device and len(works) < len(trace.kernels):
        yield (
            f"{len(trace.kernels) - len(works):,} of {len(trace.kernels):,} kernels and copies were "
            "launched outside the marked steps or before the trace began, and are not counted."
        )
    if not trace.marked:
        yield (
            "The trace has no step marks, which prof.step() of the profiler writes, so all of it counts "
            "as one step."
        )
