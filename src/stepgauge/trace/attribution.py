"""Attributes each piece of work to an operation, a range (module) and a phase.

A kernel belongs to the host call that launched it. The calls on one thread nest by time. A backward
operation runs on another thread and much later, but it has the sequence number of the forward
operation that created it, and belongs to that operation's range.
"""

import bisect
import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from stepgauge.spec.step import TRAINING_PHASES
from stepgauge.trace import flops
from stepgauge.trace.events import STEP, Call, Collective, Kernel, Shapes, Trace
from stepgauge.trace.kinds import GENERATED, Kinds
from stepgauge.trace.names import joined, readable, split
from stepgauge.trace.wrappers import wrappers

_PHASE = re.compile(rf"^\W*({'|'.join(TRAINING_PHASES)})\W*$", re.IGNORECASE)
# Words that give the phase of a range with any other name: "attn(B)", "pre_backward", "wgrad".
_WORDS = {
    "forward": re.compile(r"\(F\)|(?<![a-z])(forward|fwd|fprop)(?![a-z])", re.IGNORECASE),
    "backward": re.compile(
        r"\([BW]\)|(?<![a-z])(backward|bwd|wgrad|dgrad|bprop)(?![a-z])", re.IGNORECASE
    ),
    "optimizer": re.compile(r"(?<![a-z])(optimizer|optim)(?![a-z])", re.IGNORECASE),
}
# Annotations that PyTorch writes itself; they are not modules.
_OWN = re.compile(
    r"^(Optimizer\.|nccl:|## Call|Torch-Compiled|TorchDynamo|Pregraph|AOTDispatcher|CompiledF)"
)
_MODULE = "nn.Module: "
_EVALUATES = "autograd::engine::evaluate_function"


class Work(NamedTuple):
    """A piece of work, times in µs. A call may have several pieces; only the first counts as a call.

    range      dotted name of the module, "" outside any module
    operation  the innermost operation around it
    shapes     the operation's arguments; None if the operation only calls another one
    first      True for the first piece of work of its operation
    path       its node in Paths: its place in the flame graph
    launched   when the host's launch began and ended; None if it is not in the trace
    by_driver  True for a transfer or fill, which is not a kernel
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
    stream: tuple[int, int]
    launched: tuple[float, float] | None
    calls: int
    collective: Collective | None = None
    by_driver: bool = False

    @property
    def us(self) -> float:
        return self.end - self.start


class Paths:
    """Paths of names, stored once as nodes of a tree. Node 0 is the root."""

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
    """An open call on a thread's stack, and the phase, range and operation of the work inside it.

    whole   name of the operation whose kind everything inside has; "" for none
    pieces  how many pieces of work it has had
    """

    call: Call | None
    end: float
    phase: str
    range: str
    path: int
    operation: Call | None
    in_optimizer: bool
    whole: str
    pieces: int = 0


class Resolver:
    """Finds the pieces of work of a trace. It can be used once, because it remembers their paths."""

    def __init__(self, trace: Trace, kinds: Kinds | None = None):
        self.trace, self.paths, self.kinds = trace, Paths(), kinds or Kinds()
        self._forward_ranges: dict[int, str] = {}
        self._starts = [step.start for step in trace.steps]
        self._launches: dict[int, Frame] = {}
        self._own_ranges = any(
            _is_range(call.name)
            for calls in trace.threads.values()
            for call in calls
            if call.category == "annotation"
        )
        self._path_of_range: dict[tuple[str, str], int] = {}

    def work(self) -> Iterator[Work]:
        """Yields the pieces of work in no order: kernels if there are any, else the self time of
        operations on the host.
        """
        if not self.trace.on_device:
            for calls in self._threads():
                yield from (work for work in self._self_time(calls) if work.step >= 0)
            return
        for calls in self._threads():
            self._note_launches(calls)
        # If several kernels have correlation 0, it is not a number; they count by their start time.
        if sum(kernel.correlation == 0 for kernel in self.trace.kernels) > 1:
            self._launches.pop(0, None)
        is_paired = any(self._launch(kernel) for kernel in self.trace.kernels)
        seen: set[int] = set()
        step = -1
        for kernel in sorted(self.trace.kernels, key=lambda kernel: kernel.start):
            launch = self._launch(kernel)
            if launch is not None:
                step = self.step_of(launch[0])
            elif not is_paired:
                step = self.step_of(kernel.start)
            # Else its launch was before the trace began: it counts in the step of the kernel before.
            if step >= 0:
                yield self._kernel(kernel, step, launch, seen)

    def _launch(self, kernel: Kernel) -> tuple[float, float] | None:
        frame = None if kernel.correlation is None else self._launches.get(kernel.correlation)
        return None if frame is None or frame.call is None else (frame.call.start, frame.call.end)

    def step_of(self, time: float) -> int:
        """Returns the index of the profiled step that contains the time, or -1."""
        index = bisect.bisect_right(self._starts, time) - 1
        return index if index >= 0 and time <= self.trace.steps[index].end else -1

    def _threads(self) -> list[list[Call]]:
        """Returns the calls of each thread, outer before inner. Threads that only run backward come
        last, because they need the ranges of forward.
        """
        threads = sorted(
            self.trace.threads.values(),
            key=lambda calls: _runs_backward(calls) and not _runs_steps(calls),
        )
        if not self.trace.on_device:
            # Other threads work next to the step and are not part of it.
            within = [calls for calls in threads if _runs_steps(calls) or _runs_backward(calls)]
            threads = within or threads
        return [sorted(calls, key=lambda call: (call.start, -call.end)) for calls in threads]

    def _frames(self, calls: list[Call]) -> Iterator[tuple[Frame, float, float]]:
        """Yields (frame, start, end) for each stretch of time in which a call was the innermost."""
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
                      parent.in_optimizer, parent.whole)  # fmt: skip
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
        if match := _PHASE.match(name):
            self._enter_phase(match[1].lower(), frame)
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
        frame.phase = frame.phase or phase_in_name(name)
        frame.path = self._range_path(frame.phase or "forward", frame.range)

    def _enter_operation(self, call: Call, frame: Frame) -> None:
        if frame.operation is None or not flops.stands_for_all_inside(frame.operation.name):
            frame.operation = call
        if not frame.whole and self.kinds.whole(call.name):
            frame.whole = call.name
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
        if not frame.path:
            frame.path = self._range_path(frame.phase or "forward", frame.range)
        frame.path = self.paths.child(frame.path, call.name)

    def _range_path(self, phase: str, range: str) -> int:
        key = (phase, range)
        if key not in self._path_of_range:
            self._path_of_range[key] = self.paths.of([phase, *split(range)])
        return self._path_of_range[key]

    def _self_time(self, calls: list[Call]) -> Iterator[Work]:
        calling = wrappers(calls, self.kinds)
        for frame, start, end in self._frames(calls):
            call, phase = frame.call, _phase(frame)
            if call is None or call.name.startswith(STEP) or not phase:
                continue
            kind, rule = self.kinds.of_operation(
                call.name, call.category, frame.in_optimizer, frame.whole
            )
            first = frame.pieces == 0
            frame.pieces += 1
            yield Work(
                start=start,
                end=end,
                name=_label(call),
                kind=kind,
                rule=rule,
                phase=phase,
                range=frame.range,
                operation=call.name,
                shapes=None if id(call) in calling else call.shapes,
                first=first,
                path=frame.path,
                step=self.step_of(call.start),
                stream=(0, 0),
                launched=(call.start, call.end),
                calls=int(first),
            )

    def _note_launches(self, calls: list[Call]) -> None:
        for frame, _, _ in self._frames(calls):
            call = frame.call
            if call is not None and call.category == "runtime" and call.correlation is not None:
                self._launches[call.correlation] = frame

    def _kernel(
        self, kernel: Kernel, step: int, launch: tuple[float, float] | None, seen: set[int]
    ) -> Work:
        frame = self._launches[kernel.correlation or 0] if launch else None
        operation = frame.operation if frame else None
        operation_name = operation.name if operation else ""
        kind, rule = self.kinds.of_kernel(
            kernel.name, kernel.category, operation_name, frame.in_optimizer if frame else False
        )
        first = operation is not None and id(operation) not in seen
        if operation is not None:
            seen.add(id(operation))
        name = readable(kernel.name)
        parent = frame.path if frame else self.paths.of(["launch not in the trace"])
        return Work(
            start=kernel.start,
            end=kernel.end,
            name=name,
            kind=kind,
            rule=rule,
            phase=_phase(frame) if frame else "",
            range=frame.range if frame else "",
            operation=operation_name,
            shapes=operation.shapes if operation else None,
            first=first,
            path=self.paths.child(parent, name),
            step=step,
            stream=(kernel.device, kernel.stream),
            launched=launch,
            calls=1,
            collective=kernel.collective,
            by_driver=kernel.category == "copy",
        )


def phase_in_name(name: str) -> str:
    """Returns the phase that a range's name contains, such as "backward" for "attn(B)"; "" if it has
    none or several.
    """
    phases = [phase for phase, words in _WORDS.items() if words.search(name)]
    return phases[0] if len(phases) == 1 else ""


def _runs_steps(calls: list[Call]) -> bool:
    return any(call.name.startswith(STEP) for call in calls)


def _runs_backward(calls: list[Call]) -> bool:
    return any(call.is_backward for call in calls)


def _phase(frame: Frame) -> str:
    """Returns the phase. Work without a phase is forward, unless it is outside all operations and
    ranges.
    """
    return frame.phase or ("forward" if frame.operation or frame.range else "")


def _is_opener(frame: Frame, call: Call) -> bool:
    """True if the frame is the Python function that opened the range and returns before it ends."""
    python = frame.call is not None and frame.call.category == "python"
    return python and call.category == "annotation" and call.end > frame.end


def _is_range(name: str) -> bool:
    return not (name.startswith(STEP) or _OWN.match(name) or _PHASE.match(name))


def _label(call: Call) -> str:
    if call.name.startswith(GENERATED):
        return "compiled code"
    return "Python" if call.category in ("annotation", "python") else call.name
