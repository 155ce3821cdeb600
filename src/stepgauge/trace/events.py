"""What the events of a PyTorch trace mean: calls on the threads of the host, kernels on the streams
of the device.
"""

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

# What the category names mean; those of PyTorch before 1.13 begin with a capital.
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
# What else torch.profiler writes: no work of a device.
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
# Processes of Ascend's traces that are not a device either.
_HOST_PROCESSES = {"CANN", "Python", "Overlap Analysis", "Spans", "Traces"}
STEP = "ProfilerStep#"
# Calls in which the host waits for the device, of CUDA, HIP and XPU; a copy named so and a free do.
_WAITS = re.compile(r"Synchronize|(Memcpy|MemcpyWithStream|Free|QueueFinish|EventWait)$")


class Shapes(NamedTuple):
    """What an operation was called with, as far as record_shapes kept it: one entry an argument."""

    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[str, ...]


class Call(NamedTuple):
    """What ran on a thread of the host, in µs. `sequence` pairs a forward with its backward."""

    start: float
    end: float
    name: str
    category: str
    sequence: int | None
    is_backward: bool
    correlation: int | None
    shapes: Shapes | None


class Collective(NamedTuple):
    """What a communication kernel says: elements in and out of this rank, its process group."""

    name: str
    num_in: int
    num_out: int
    dtype: str
    group: str
    group_size: int


class Kernel(NamedTuple):
    """What ran on a stream of the device, in µs."""

    start: float
    end: float
    name: str
    category: str
    stream: int
    correlation: int | None
    device: int = 0
    collective: Collective | None = None


class Mark(NamedTuple):
    """A step as the host marked it, times in µs. Steps of one `run` follow each other."""

    start: float
    end: float
    run: int = 0


@dataclasses.dataclass
class Trace:
    """One rank's trace. A thread is (process, thread).

    transfers  a host backend's collectives
    steps      as the host marked them, or everything as one where it did not (`marked` is false)
    unknown    events of devices that are not understood, by the device's name
    without_duration  events that have none, or a negative one
    in_order   steps' numbers rise with time
    repeated   kernels that stood in the file more than once
    letters    events that are no whole call, by Chrome's letter: "B", "E", "" for none
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
        """The calls of a category, thread by thread."""
        for thread in self.threads.values():
            yield from (call for call in thread if call.category == category)

    def waits(self) -> Iterator[Call]:
        """The calls in which the host waits for the device."""
        return (call for call in self.calls("runtime") if _WAITS.search(call.name))


@without_collector()
def load(path: Path, *later: Path) -> Trace:
    """The trace of a process; `later` ones are of the same process, from further cycles of its
    profiler.

    Raises TraceError for a file that is no trace, or one in which nothing ran.
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
    """Events of categories that are not known, by process and category; a process's name may come
    after them.
    """

    def __init__(self) -> None:
        self.seen: Counter[Any] = Counter()
        self.names: dict[Any, str] = {}

    def name(self, event: dict[str, Any]) -> None:
        arguments = event.get("args")
        if isinstance(arguments, dict):
            self.names[fields.key(event.get("pid"))] = str(arguments.get("name", ""))

    def devices(self, trace: Trace) -> dict[str, int]:
        """Of processes that are not the host's; one without a name goes by the category."""
        hosts = {process for process, _ in trace.threads}
        result: Counter[str] = Counter()
        for (process, kind), number in self.seen.items():
            name = self.names.get(process) or (f"category {kind!r}" if kind else "no category")
            if process not in hosts and name not in _HOST_PROCESSES:
                result[name] += number
        return dict(result.most_common())


def _only(trace: Trace) -> str:
    if trace.unknown:
        old = "; torch.profiler has written categories (cat) since PyTorch 1.8"
        return (
            f", only events of {', '.join(trace.unknown)}{old * ('no category' in trace.unknown)}"
        )
    if trace.letters["B"]:
        return (
            f": {trace.letters['B']:,} calls are pairs of begin and end (ph B and E), not whole (X)"
        )
    return f": {trace.letters['']:,} events do not say what they are (ph)" * bool(trace.letters[""])


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
    """The sizes of a tensor; nothing of a list of tensors or of what is no tensor."""
    plain = isinstance(argument, list) and all(isinstance(size, int) for size in argument)
    return tuple(argument) if plain else ()


def _add(trace: Trace, category: str, event: dict[str, Any], shapes: _Shapes) -> None:
    try:
        start = fields.time(event["ts"])
        duration = fields.time(event.get("dur", -1.0))
        name = sys.intern(event["name"])
    except (KeyError, TypeError, ValueError):
        raise TraceError(
            f"{trace.path} is no trace of PyTorch: an event has no name or time"
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


@functools.cache
def _known(*fields: Any) -> Collective:
    return Collective(*fields)


def _collective(arguments: dict[str, Any]) -> Collective:
    group = arguments.get("Process Group Ranks") or arguments.get("Process Group Name", "")
    return _known(
        str(arguments["Collective name"]),
        fields.whole(arguments.get("In msg nelems")) or 0,
        fields.whole(arguments.get("Out msg nelems")) or 0,
        str(arguments.get("dtype", "")),
        str(group),
        fields.whole(arguments.get("Group size")) or 0,
    )


def _steps(trace: Trace) -> list[Mark]:
    """The profiled steps; where none is marked, all that is there as one.

    Steps whose numbers do not follow each other are of different cycles of the profiler. A step that
    several threads mark is one.
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
