"""Turns the events of a PyTorch trace into calls on host threads and kernels on device streams."""

import dataclasses
import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stepgauge.trace import fields
from stepgauge.trace.collector import without_collector
from stepgauge.trace.read import TraceError, read

# Meaning of the category names in lower case; before PyTorch 1.13 they begin with a capital.
_CATEGORIES = {
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "annotation",
    "python_function": "python",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "runtime": "runtime",
    "xpu_runtime": "runtime",
    "xpu_driver": "runtime",
    "hpu_op": "runtime",
    "privateuse1_runtime": "runtime",
    "privateuse1_driver": "runtime",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "memcpy": "copy",
    "memset": "copy",
}
# Other categories of torch.profiler, which are not work of a device.
_ASIDE = {
    "gpu_user_annotation",
    "overhead",
    "trace",
    "cuda_sync",
    "cuda_event",
    "cuda_profiler_range",
    "xpu_sync",
    "xpu_scope_profiler",
    "gpu_pm_counter",
    "mtia_runtime",
    "mtia_counters",
    "external_correlation",
    "cpu_instant_event",
    "collective_comm",
}
# Processes in Ascend's traces that are not a device.
_HOST_PROCESSES = {"CANN", "Python", "Overlap Analysis", "Spans", "Traces"}
STEP = "ProfilerStep#"
# Calls of CUDA, HIP and XPU in which the host waits for the device, including some copies and frees.
_WAITS = re.compile(r"Synchronize|(Memcpy|MemcpyWithStream|Free|QueueFinish|EventWait)$")


class Shapes(NamedTuple):
    """The arguments of an operation as record_shapes wrote them, with one entry per argument."""

    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[str, ...]


class Call(NamedTuple):
    """A call on a host thread, times in µs. `sequence` links a forward operation to its backward."""

    start: float
    end: float
    name: str
    category: str
    sequence: int | None
    is_backward: bool
    correlation: int | None
    shapes: Shapes | None


class Collective(NamedTuple):
    """The arguments of a communication kernel: this rank's elements in and out, its process group."""

    name: str
    num_in: int
    num_out: int
    dtype: str
    group: str
    group_size: int


class Kernel(NamedTuple):
    """A kernel or copy on a stream of the device, times in µs."""

    start: float
    end: float
    name: str
    category: str
    stream: int
    correlation: int | None
    device: int = 0
    collective: Collective | None = None


class Mark(NamedTuple):
    """A step as the host marked it, times in µs. Steps of one `run` are consecutive."""

    start: float
    end: float
    run: int = 0


@dataclasses.dataclass
class Trace:
    """One rank's trace. A thread is (process, thread).

    transfers  collectives of a host backend
    steps      the marked steps; without marks, the whole trace as one step
    marked     True if the trace marks its steps
    unknown    number of events of unknown devices, by the device's name
    in_order   True if the steps' numbers increase with time
    repeated   number of kernels that are in the file more than once
    without_duration  number of events with no or a negative duration
    letters    number of events that are not complete calls, by Chrome's letter: "B", "E", "" for none
    """

    path: Path
    rank: int | None = None
    device: str = ""
    threads: dict[tuple[Any, Any], list[Call]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )
    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    transfers: list[Call] = dataclasses.field(default_factory=list)
    steps: list[Mark] = dataclasses.field(default_factory=list)
    marked: bool = False
    unknown: dict[str, int] = dataclasses.field(default_factory=dict)
    in_order: bool = True
    repeated: int = 0
    without_duration: int = 0
    letters: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def on_device(self) -> bool:
        return bool(self.kernels)

    def calls(self, category: str) -> Iterator[Call]:
        """Yields the calls of a category, thread by thread."""
        for thread in self.threads.values():
            yield from (call for call in thread if call.category == category)

    def waits(self) -> Iterator[Call]:
        """Returns the calls in which the host waits for the device."""
        return (call for call in self.calls("runtime") if _WAITS.search(call.name))


@without_collector()
def load(path: Path, *later: Path) -> Trace:
    """Loads the trace of one process. `later` files come from further cycles of the same profiler.

    Raises TraceError if a file is not a trace, or if nothing ran in it.
    """
    trace, shapes, foreign = Trace(path), _Shapes(), _Foreign()
    for key, value in (part for file in (path, *later) for part in read(file)):
        if key:
            _note(trace, key, value)
        elif not isinstance(value, dict):
            continue
        elif value.get("ph") == "X":
            kind = str(value.get("cat", "")).lower()
            if category := _CATEGORIES.get(kind):
                _add(trace, category, value, shapes)
            elif kind not in _ASIDE:
                foreign.seen[fields.key(value.get("pid")), kind] += 1
        elif value.get("name") == "process_name":
            foreign.name(value)
        else:
            trace.letters[str(value.get("ph", ""))] += 1
    trace.unknown = foreign.devices(trace)
    if not trace.kernels and not any(trace.calls("op")):
        raise TraceError(f"{path} has neither kernels nor operations of PyTorch{_only(trace)}")
    once = list(dict.fromkeys(trace.kernels))
    trace.kernels, trace.repeated = once, len(trace.kernels) - len(once)
    trace.steps = _steps(trace)
    return trace


class _Foreign:
    """Counts events of unknown categories. A process's name may come after its events in the file."""

    def __init__(self) -> None:
        self.seen: Counter[Any] = Counter()
        self.names: dict[Any, str] = {}

    def name(self, event: dict[str, Any]) -> None:
        arguments = event.get("args")
        if isinstance(arguments, dict):
            self.names[fields.key(event.get("pid"))] = str(arguments.get("name", ""))

    def devices(self, trace: Trace) -> dict[str, int]:
        """Returns the number of events by device, leaving out the host's processes. A process without a
        name is named by the category.
        """
        hosts = {process for process, _ in trace.threads}
        result: Counter[str] = Counter()
        for (process, kind), number in self.seen.items():
            name = self.names.get(process) or (f"category {kind!r}" if kind else "no category")
            if process not in hosts and name not in _HOST_PROCESSES:
                result[name] += number
        return dict(result.most_common())


def _only(trace: Trace) -> str:
    if trace.unknown:
        devices = f", only events of {', '.join(trace.unknown)}"
        if "no category" in trace.unknown:
            devices += "; torch.profiler has written categories (cat) since PyTorch 1.8"
        return devices
    if trace.letters["B"]:
        return f": {trace.letters['B']:,} calls are written as pairs of begin and end (ph B and E)"
    return f": {trace.letters['']:,} events have no type (ph)" if trace.letters[""] else ""


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
    """Stores equal shapes once: the events of a step repeat them thousands of times."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str, str], Shapes] = {}

    def of(self, arguments: dict[str, Any]) -> Shapes | None:
        dims = arguments.get("Input Dims")
        if not dims or not isinstance(dims, list):
            return None
        types, values = arguments.get("Input type", ()), arguments.get("Concrete Inputs", ())
        key = (str(dims), str(types), str(values))
        if key not in self.known:
            flat = tuple(_sizes(argument) for argument in dims)
            self.known[key] = Shapes(flat, _texts(types), _texts(values))
        return self.known[key]


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values)) if isinstance(values, list) else ()


def _sizes(argument: Any) -> tuple[int, ...]:
    """Returns the sizes of a tensor; () for a list of tensors and for other arguments."""
    plain = isinstance(argument, list) and all(isinstance(size, int) for size in argument)
    return tuple(argument) if plain else ()


def _add(trace: Trace, category: str, event: dict[str, Any], shapes: _Shapes) -> None:
    try:
        start = fields.time(event["ts"])
        duration = fields.time(event.get("dur", -1.0))
        name = sys.intern(event["name"])
    except (KeyError, TypeError, ValueError):
        raise TraceError(
            f"{trace.path} is not a trace of PyTorch: an event has no valid name or time"
        ) from None
    if duration < 0.0:
        trace.without_duration += 1
        duration = 0.0
    end = start + duration
    arguments = event.get("args")
    arguments = arguments if isinstance(arguments, dict) else {}
    correlation = fields.whole(arguments.get("correlation"))
    if category in ("kernel", "copy"):
        trace.kernels.append(_kernel(start, end, name, category, event, arguments))
        return
    sequence = fields.whole(arguments.get("Sequence number")) if category == "op" else None
    backward = bool(arguments.get("Fwd thread id")) or name.startswith("autograd::engine")
    shape = shapes.of(arguments) if category == "op" else None
    call = Call(start, end, name, category, sequence, backward, correlation, shape)
    if name.startswith("gloo:"):
        trace.transfers.append(call)
        return
    if not name.startswith("PyTorch Profiler"):
        thread = fields.key(event.get("pid")), fields.key(event.get("tid"))
        trace.threads[thread].append(call)


def _kernel(
    start: float,
    end: float,
    name: str,
    category: str,
    event: dict[str, Any],
    arguments: dict[str, Any],
) -> Kernel:
    collective = None
    if "Collective name" in arguments:
        collective = _collective(arguments)
    return Kernel(
        start,
        end,
        name,
        category,
        fields.track(arguments.get("stream", event.get("tid"))),
        fields.whole(arguments.get("correlation")),
        fields.track(arguments.get("device")),
        collective,
    )


_cached_collective = functools.cache(Collective)  # equal arguments are stored once


def _collective(arguments: dict[str, Any]) -> Collective:
    group = arguments.get("Process Group Ranks") or arguments.get("Process Group Name", "")
    return _cached_collective(
        str(arguments["Collective name"]),
        fields.whole(arguments.get("In msg nelems")) or 0,
        fields.whole(arguments.get("Out msg nelems")) or 0,
        str(arguments.get("dtype", "")),
        str(group),
        fields.whole(arguments.get("Group size")) or 0,
    )


def _steps(trace: Trace) -> list[Mark]:
    """Returns the profiled steps; without marks, the whole trace as one step.

    A gap in the steps' numbers begins a new cycle of the profiler. A step that several threads mark
    counts once.
    """
    marked = sorted(
        {
            (call.start, call.end, fields.whole(number) or 0)
            for thread in trace.threads.values()
            for call in thread
            if call.name.startswith(STEP)
            for number in (call.name.removeprefix(STEP),)
        }
    )
    if not marked:
        calls = (call for thread in trace.threads.values() for call in thread)
        times = [(event.start, event.end) for events in (calls, trace.kernels) for event in events]
        return [Mark(min(start for start, _ in times), max(end for _, end in times))]
    trace.marked = True
    result: list[Mark] = []
    before = marked[0][2]
    for start, end, number in marked:
        if result and number == before and start < result[-1].end:
            result[-1] = result[-1]._replace(end=max(end, result[-1].end))
            continue
        run = result[-1].run + (number not in (before, before + 1)) if result else 0
        trace.in_order &= number >= before
        result.append(Mark(start, end, run))
        before = number
    return result
