"""What has to be known of a trace before its figures are believed, a sentence each."""

from collections.abc import Iterator, Sequence

from stepgauge.trace.attribution import Work
from stepgauge.trace.events import Trace

EARLY_US = 1.0  # a kernel that begins so long before its launch was timed by another clock


def notes(trace: Trace, works: Sequence[Work]) -> list[str]:
    """Of `works`, the pieces of work that are counted."""
    return [*_of_events(trace), *_of_launches(trace, works), *_of_steps(trace, works)]


def _of_events(trace: Trace) -> Iterator[str]:
    if trace.unknown:
        devices = ", ".join(f"{number:,} of {name}" for name, number in trace.unknown.items())
        said = "" if trace.on_device else "; the figures are of the host's operations alone"
        yield (
            f"The trace has events of devices that are not understood here ({devices}): they are left "
            f"out{said}."
        )
    elif trace.device and not trace.on_device:
        yield (
            f"The trace was taken beside a device ({trace.device}) and has no kernels of it: the figures "
            "are of the host's operations, which may only launch its work. Record ProfilerActivity.CUDA too."
        )
    if trace.letters["B"]:
        yield (
            f"Calls written as pairs of begin and end (ph B and E): {trace.letters['B']:,}. They are "
            "left out; torch.profiler writes whole calls (X)."
        )
    if trace.without_duration:
        yield (
            f"Events without a duration, or with a negative one: {trace.without_duration:,}. They count "
            "as 0 µs."
        )
    if trace.repeated:
        yield f"Kernels that stand in the trace more than once: {trace.repeated:,}. Each counts once."


def _of_launches(trace: Trace, works: Sequence[Work]) -> Iterator[str]:
    if not trace.on_device:
        return
    alone = sum(not work.launched for work in works)
    if alone == len(works):
        yield (
            "No kernel has its launch in the trace: operations, ranges, phases and causes of idle "
            "time are not known."
        )
    elif alone:
        yield (
            f"{alone:,} of {len(works):,} kernels and copies have no launch in the trace: each counts "
            "for the step of the one before it and for no phase or range."
        )
    launches = [call.correlation for call in trace.calls("runtime") if call.correlation]
    if twice := len(launches) - len(set(launches)):
        yield (
            f"Launches whose number (correlation) others have too: {twice:,}, as in a file made of "
            "several processes' traces. Kernels may be given to the wrong operations; analyse each "
            "process's trace by itself."
        )
    elif early := [
        us for us in (w.launched[0] - w.start for w in works if w.launched) if us > EARLY_US
    ]:
        yield (
            f"Kernels that begin before their launch: {len(early):,}, by up to {max(early):,.0f} µs. The "
            "clocks of host and device differ: launch delays, lead-in, tail and the causes of idle "
            "time are not to be trusted; sums, busy and idle time are the device's own."
        )
    devices = sorted({work.stream[0] for work in works})
    if len(devices) > 1:
        yield (
            f"The work of {len(devices)} devices ({', '.join(map(str, devices))}) is on one time line: "
            "busy is when any of them is, idle when none is."
        )


def _of_steps(trace: Trace, works: Sequence[Work]) -> Iterator[str]:
    steps = len({work.step for work in works})
    if trace.marked and not trace.in_order:
        yield (
            "The steps' numbers go back as time goes on: a clock jumped, or the file holds several "
            "processes. What lies between such steps is not counted."
        )
    if trace.marked and steps < len(trace.steps):
        yield (
            f"{len(trace.steps) - steps} of {len(trace.steps)} marked steps launched no work and are "
            "not counted."
        )
    if trace.on_device and len(works) < len(trace.kernels):
        yield (
            f"{len(trace.kernels) - len(works):,} of {len(trace.kernels):,} kernels and copies were "
            "launched outside of the marked steps, or before the trace began, and are not counted."
        )
    if not trace.marked:
        yield (
            "The trace has no step marks, which the profiler's prof.step() writes: all of it is taken "
            "as one step."
        )
