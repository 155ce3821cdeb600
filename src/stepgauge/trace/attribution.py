"""Who asked for each piece of work: its operation, its range, its phase, by nesting and
correlation.

A kernel belongs to the host call that launched it. The calls on one thread nest by time. A backward
operation runs on another thread and long after, yet it carries the sequence number of the forward
operation that made it, and so belongs to that one's range.
"""

import bisect
import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from stepgauge.trace import flops, kinds
from stepgauge.trace.events import STEP, Call, Kernel, Shapes, Trace

PHASES = ("forward", "backward", "optimizer")
_PHASE = re.compile(rf"^\W*({'|'.join(PHASES)})\W*$", re.IGNORECASE)
# What PyTorch annotates by itself: no part of the model.
_OWN = re.compile(
    r"^(Optimizer\.|nccl:|## Call|Torch-Compiled|TorchDynamo|Pregraph|AOTDispatcher|CompiledF)"
)
_MODULE = "nn.Module: "
_EVALUATES = "autograd::engine::evaluate_function"


class Work(NamedTuple):
    """A piece of work, times in µs. Pieces of one call add up; only the first counts as a call.

    range     dotted name of the part of the model, "" outside of all
    operation the innermost operation around it, with `shapes`; `first` for its first piece of work
    path      node of Paths: where it stands in the flame graph
    launched  when the host asked for it, None where the trace does not say
    """

    start: float
    end: float
    name: str
    kind: str
    rule: str
    phase: str
    range: str
    operation: str
    shapes: Shapes | None
    first: bool
    path: int
    step: int
    stream: int
    launched: float | None
    calls: int

    @property
    def us(self) -> float:
        return self.end - self.start


class Paths:
    """Paths of names as nodes of one tree, so that each is kept once. Node 0 is the root."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, str]] = [(0, "")]
        self._known: dict[tuple[int, str], int] = {}

    def child(self, parent: int, name: str) -> int:
        node = self._known.get((parent, name))
        if node is None:
            node = self._known[parent, name] = len(self.nodes)
            self.nodes.append((parent, name))
        return node

    def of(self, names: list[str]) -> int:
        node = 0
        for name in names:
            node = self.child(node, name)
        return node

    def names(self, node: int) -> list[str]:
        result = []
        while node:
            node, name = self.nodes[node]
            result.append(name)
        return result[::-1]


@dataclasses.dataclass(slots=True)
class Frame:
    """A call that has begun on a thread, and what holds inside it."""

    call: Call | None
    end: float
    phase: str
    range: str
    path: int
    operation: Call | None
    in_optimizer: bool
    composite: str
    pieces: int = 0


class Resolver:
    """Goes through a trace once; `work` gives its pieces."""

    def __init__(self, trace: Trace):
        self.trace, self.paths = trace, Paths()
        self._forward_ranges: dict[int, str] = {}
        self._starts = [start for start, _ in trace.steps]
        self._launches: dict[int, tuple[float, Frame]] = {}
        self._own_ranges = any(
            _is_range(call.name)
            for calls in trace.threads.values()
            for call in calls
            if call.category == "annotation"
        )
        self._path_of_range: dict[tuple[str, str], int] = {}

    def work(self) -> Iterator[Work]:
        """In no order. On a trace with kernels these; else the operations, each by what it did
        itself.
        """
        if not self.trace.on_device:
            for calls in self._threads():
                yield from (work for work in self._self_time(calls) if work.step >= 0)
            return
        for calls in self._threads():
            self._note_launches(calls)
        seen: set[int] = set()
        for kernel in sorted(self.trace.kernels):
            work = self._kernel(kernel, seen)
            if work.step >= 0:
                yield work

    def step_of(self, time: float) -> int:
        """Which profiled step a time lies in, -1 for none."""
        index = bisect.bisect_right(self._starts, time) - 1
        return index if index >= 0 and time <= self.trace.steps[index][1] else -1

    def _threads(self) -> list[list[Call]]:
        """The calls of each thread, outer before inner; threads that only run backward last."""

        def only_backward(calls: list[Call]) -> bool:
            return not any(call.name.startswith(STEP) for call in calls) and any(
                call.is_backward for call in calls
            )

        threads = sorted(self.trace.threads.values(), key=only_backward)
        if not self.trace.on_device:
            # Threads that neither step nor run backward work beside the step, not in it.
            steps = [
                t
                for t in threads
                if any(call.name.startswith(STEP) or call.is_backward for call in t)
            ]
            threads = steps or threads
        return [sorted(calls, key=lambda call: (call.start, -call.end)) for calls in threads]

    def _frames(self, calls: list[Call]) -> Iterator[tuple[Frame, float, float]]:
        """Each call's frame, over each time in which it was the innermost: (frame, start, end)."""
        stack = [Frame(None, float("inf"), "", "", 0, None, False, "")]
        now = 0.0
        for call in calls:
            while stack[-1].end <= call.start or _is_opener(stack[-1], call):
                done = stack.pop()
                done.end = min(done.end, call.start)
                if done.end > now or not done.pieces:
                    yield done, now, max(now, done.end)
                now = max(now, done.end)
            if call.start > now:
                if stack[-1].call is not None:
                    yield stack[-1], now, call.start
                now = call.start
            stack.append(self._opened(call, stack[-1]))
        while len(stack) > 1:
            done = stack.pop()
            yield done, now, max(now, done.end)
            now = max(now, done.end)

    def _opened(self, call: Call, parent: Frame) -> Frame:
        frame = Frame(call, min(call.end, parent.end), parent.phase, parent.range, parent.path, parent.operation,
                      parent.in_optimizer, parent.composite)  # fmt: skip
        if call.category == "annotation":
            self._enter_annotation(call.name, frame)
        elif call.category == "python":
            if call.name.startswith(_MODULE) and not self._own_ranges:
                self._enter_range(call.name.removeprefix(_MODULE), frame)
            else:
                frame.path = self.paths.child(frame.path, call.name)
        elif call.category == "op":
            self._enter_operation(call, frame)
        return frame

    def _enter_annotation(self, name: str, frame: Frame) -> None:
        if found := _PHASE.match(name):
            self._enter_phase(found[1].lower(), frame)
        elif name.startswith("Optimizer."):
            frame.in_optimizer = name.startswith("Optimizer.step")
            self._enter_phase("optimizer", frame)
        elif _is_range(name):
            self._enter_range(name, frame)
        elif not name.startswith(STEP):
            frame.path = self.paths.child(frame.path, name)

    def _enter_phase(self, phase: str, frame: Frame) -> None:
        if frame.phase != phase:
            frame.phase = phase
            frame.path = self._range_path(phase, frame.range)

    def _enter_range(self, name: str, frame: Frame) -> None:
        frame.range = joined(frame.range, name)
        frame.phase = frame.phase or "forward"
        frame.path = self._range_path(frame.phase, frame.range)

    def _enter_operation(self, call: Call, frame: Frame) -> None:
        if frame.operation is None or not flops.stands_for_all_inside(frame.operation.name):
            frame.operation = call
        if not frame.composite and kinds.is_composite(call.name):
            frame.composite = call.name
        if call.is_backward and call.name.startswith(_EVALUATES):
            frame.phase = "backward"
            frame.range = self._forward_ranges.get(
                -1 if call.sequence is None else call.sequence, ""
            )
            frame.path = self._range_path(frame.phase, frame.range)
            return
        if (
            call.sequence is not None
            and call.sequence >= 0
            and not call.is_backward
            and frame.phase != "backward"
        ):
            self._forward_ranges[call.sequence] = frame.range
        if not frame.phase:
            self._enter_phase("forward", frame)
        frame.path = self.paths.child(frame.path, call.name)

    def _range_path(self, phase: str, range: str) -> int:
        key = (phase, range)
        if key not in self._path_of_range:
            self._path_of_range[key] = self.paths.of([phase, *split(range)])
        return self._path_of_range[key]

    def _self_time(self, calls: list[Call]) -> Iterator[Work]:
        for frame, start, end in self._frames(calls):
            call = frame.call
            if call is None or call.name.startswith(STEP) or not frame.phase:
                continue
            placed = kinds.of_operation(
                call.name, call.category, frame.in_optimizer, frame.composite
            )
            first = frame.pieces == 0
            frame.pieces += 1
            yield Work(start, end, _label(call), *placed, frame.phase, frame.range, call.name, call.shapes, first,
                       frame.path, self.step_of(call.start), 0, call.start, int(first))  # fmt: skip

    def _note_launches(self, calls: list[Call]) -> None:
        for frame, _, _ in self._frames(calls):
            call = frame.call
            if call is not None and call.category == "runtime" and call.correlation is not None:
                self._launches[call.correlation] = (call.start, frame)

    def _kernel(self, kernel: Kernel, seen: set[int]) -> Work:
        launched, frame = self._launches.get(
            -1 if kernel.correlation is None else kernel.correlation, (None, None)
        )
        operation = frame.operation if frame else None
        optimizer = frame.in_optimizer if frame else False
        placed = kinds.of_kernel(
            kernel.name, kernel.category, operation.name if operation else "", optimizer
        )
        first = operation is not None and id(operation) not in seen
        if operation is not None:
            seen.add(id(operation))
        path = self.paths.child(
            frame.path if frame else self.paths.of(["not launched here"]), readable(kernel.name)
        )
        return Work(kernel.start, kernel.end, readable(kernel.name), *placed, frame.phase if frame else "",
                    frame.range if frame else "", operation.name if operation else "",
                    operation.shapes if operation else None, first, path,
                    self.step_of(kernel.start if launched is None else launched), kernel.stream, launched,
                    1)  # fmt: skip


def _is_opener(frame: Frame, call: Call) -> bool:
    """Whether the frame is the Python function that opened the range: it returns, and the range
    goes on.
    """
    python = frame.call is not None and frame.call.category == "python"
    return python and call.category == "annotation" and call.end > frame.end


def _is_range(name: str) -> bool:
    return not (name.startswith(STEP) or _OWN.match(name) or _PHASE.match(name))


def _label(call: Call) -> str:
    if call.name.startswith(kinds.GENERATED):
        return "compiled code"
    return "Python" if call.category in ("annotation", "python") else call.name


def joined(outer: str, name: str) -> str:
    """The name inside of the outer range, unless it is a qualified name itself.

    Backward may run a whole block's forward again, inside the range of any of its operations.
    """
    same_root = outer.partition(".")[0] == name.partition(".")[0]
    return name if not outer or name == outer or (same_root and "." in name) else f"{outer}.{name}"


def split(range: str) -> list[str]:
    """A dotted name by its parts, a number kept with what it counts: "blocks.0.attention" is two."""
    return re.split(r"\.(?!\d+(?:\.|$))", range) if range else []


def readable(name: str) -> str:
    """A kernel's name without what all C++ names share."""
    name = re.sub(
        r"^void |at::native::|\(anonymous namespace\)::|at_cuda_detail::|<unnamed>::", "", name
    )
    depth, end = 0, len(name)
    for index, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0 and index:
            end = index
            break
    return name[:end].rstrip()
