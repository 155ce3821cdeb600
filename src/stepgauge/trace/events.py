"""What the events of a PyTorch trace mean: calls on the threads of the host, kernels on the streams
of the device.
"""

import dataclasses
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from stepgauge.trace.read import TraceError, read

# What the category names mean; those of PyTorch before 1.13 are written large.
_CATEGORIES = {
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "annotation",
    "python_function": "python",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "runtime": "runtime",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "memcpy": "copy",
    "memset": "copy",
}
STEP = "ProfilerStep#"


class Shapes(NamedTuple):
    """What an operation was called with, as far as record_shapes kept it: one entry an argument."""

    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[str, ...]


class Call(NamedTuple):
    """Something that ran on a thread of the host, times in µs. `sequence` pairs a forward with its
    backward.
    """

    start: float
    end: float
    name: str
    category: str
    sequence: int | None
    is_backward: bool
    correlation: int | None
    shapes: Shapes | None


class Kernel(NamedTuple):
    """Something that ran on a stream of the device, times in µs."""

    start: float
    end: float
    name: str
    category: str
    stream: int
    correlation: int | None


@dataclasses.dataclass
class Trace:
    """One rank's trace. A thread is (process, thread); `transfers` are a host backend's
    collectives.
    """

    path: Path
    rank: int | None = None
    device: str = ""
    threads: dict[tuple[Any, Any], list[Call]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )
    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    transfers: list[Call] = dataclasses.field(default_factory=list)
    steps: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @property
    def on_device(self) -> bool:
        return bool(self.kernels)


def load(path: Path, *later: Path) -> Trace:
    """The trace of a process; `later` ones are of the same process, from further cycles of its
    profiler.

    Raises TraceError for a file that is no trace, or one in which nothing ran.
    """
    trace, shapes = Trace(path), _Shapes()
    for key, value in (part for file in (path, *later) for part in read(file)):
        if key:
            _note(trace, key, value)
        elif isinstance(value, dict) and value.get("ph") == "X":
            category = _CATEGORIES.get(str(value.get("cat", "")).lower())
            if category:
                _add(trace, category, value, shapes)
    if not trace.kernels and not any(
        call.category == "op" for calls in trace.threads.values() for call in calls
    ):
        raise TraceError(f"{path} has neither kernels nor operations of PyTorch")
    trace.steps = _steps(trace)
    return trace


def _note(trace: Trace, key: str, value: Any) -> None:
    if key == "distributedInfo" and isinstance(value, dict):
        rank = value.get("rank")
        trace.rank = rank if isinstance(rank, int) else None
    if (
        key == "deviceProperties"
        and isinstance(value, list)
        and value
        and isinstance(value[0], dict)
    ):
        trace.device = str(value[0].get("name", ""))


class _Shapes:
    """Equal shapes are kept once: a step repeats them by the thousand."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str, str], Shapes] = {}

    def of(self, arguments: dict[str, Any]) -> Shapes | None:
        dims = arguments.get("Input Dims")
        if not dims:
            return None
        types, values = arguments.get("Input type", ()), arguments.get("Concrete Inputs", ())
        key = (str(dims), str(types), str(values))
        if key not in self.known:
            flat = tuple(_sizes(argument) for argument in dims)
            self.known[key] = Shapes(flat, tuple(map(str, types)), tuple(map(str, values)))
        return self.known[key]


def _sizes(argument: Any) -> tuple[int, ...]:
    """The sizes of a tensor; nothing of a list of tensors or of what is no tensor."""
    plain = isinstance(argument, list) and all(isinstance(size, int) for size in argument)
    return tuple(argument) if plain else ()


def _add(trace: Trace, category: str, event: dict[str, Any], shapes: _Shapes) -> None:
    try:
        start = float(event["ts"])
        end = start + max(0.0, float(event.get("dur", 0.0)))
        name = sys.intern(event["name"])
    except (KeyError, TypeError, ValueError):
        raise TraceError(
            f"{trace.path} is no trace of PyTorch: an event has no name or time"
        ) from None
    arguments = event.get("args")
    arguments = arguments if isinstance(arguments, dict) else {}
    correlation = arguments.get("correlation")
    if category in ("kernel", "copy"):
        stream = arguments.get("stream", event.get("tid", 0))
        trace.kernels.append(Kernel(start, end, name, category, stream, correlation))
        return
    sequence = arguments.get("Sequence number") if category == "op" else None
    backward = bool(arguments.get("Fwd thread id")) or name.startswith("autograd::engine")
    shape = shapes.of(arguments) if category == "op" else None
    call = Call(start, end, name, category, sequence, backward, correlation, shape)
    if name.startswith("gloo:"):
        trace.transfers.append(call)
        return
    if not name.startswith("PyTorch Profiler"):
        trace.threads[event.get("pid"), event.get("tid")].append(call)


def _steps(trace: Trace) -> list[tuple[float, float]]:
    """The profiled steps as (start, end); where none is marked, all that is there as one."""
    calls = [call for thread in trace.threads.values() for call in thread]
    marked = {(call.start, call.end) for call in calls if call.name.startswith(STEP)}
    if marked:
        return sorted(marked)
    times = [(event.start, event.end) for events in (calls, trace.kernels) for event in events]
    return [(min(start for start, _ in times), max(end for _, end in times))]
