"""A step of one rank written down as works of its streams: forward, backward and optimizer of its
share, and where a way of data parallel training adds communication.

The host launches what is outside of blocks together (most of its time there is before the first
launch), of a block one term after the other; the device runs them in order. Collectives of a tensor
axis stand between two computations, which wait for them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from stepgauge.cost.operations.terms import Arithmetic, Term
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.events import COMPUTE, HOST, StreamWork

TENSOR, DATA = "tensor", "data"  # the streams of their communicators


class Program:
    """Works as they are added; those of computing wait for the last `wait`."""

    def __init__(self) -> None:
        self.works: list[StreamWork] = []
        self.ends: dict[str, int] = {}  # of each phase, the work that ends it
        self._before: list[int] = []

    def add(self, work: StreamWork) -> int:
        self.works.append(work)
        return len(self.works) - 1

    def host(self, name: str, us: float) -> None:
        """What the host launches next; the device then waits for it."""
        if us > 0:
            self.wait(self.add(StreamWork(name, HOST, us)))

    def compute(self, name: str, us: float, operation: str = "") -> int:
        after, self._before = tuple(self._before), []
        return self.add(StreamWork(name, COMPUTE, us, operation, after))

    def call(self, name: str, us: float) -> tuple[int, ...]:
        """What the host does while the device computes what it has: the call of a collective."""
        return (self.add(StreamWork(name, HOST, us)),) if us > 0 else ()

    def send(
        self, name: str, stream: str, us: float, operation: str, *, after: int = -1,
        called: tuple[int, ...] = (),
    ) -> int:  # fmt: skip
        """On a communicator, when `after` has ended (-1: what was computed last) and it is `called`."""
        after = after if after >= 0 else self.compute(f"{name} starts", 0.0)
        return self.add(StreamWork(name, stream, us, operation, (after, *called)))

    def wait(self, *works: int) -> None:
        """What is computed next waits for these."""
        self._before += works

    def end(self, phase: str) -> None:
        self.ends[phase] = self.compute(f"end of {phase}", 0.0)


@dataclasses.dataclass(frozen=True)
class Launching:
    """Microseconds of the host for a phase: of each block, and of all that is outside of blocks."""

    block_us: float = 0.0
    outside_us: float = 0.0

    def us(self, blocks: float) -> float:
        return max(0.0, self.outside_us + self.block_us * blocks)


@dataclasses.dataclass(frozen=True)
class LaunchGroup:
    """Terms of a block, or of one of the ends, which the host launches one after the other, or all
    before the device has the first.
    """

    name: str
    terms: Sequence[Term]
    host_us: float
    one_by_one: bool = False

    @property
    def gradients(self) -> int:
        """How many parameters get theirs here, where it is of backward."""
        return sum(1 for term in self.terms if term.gradient)


class Operations(Protocol):
    """What a rank runs: a list of operations with their sizes, by formulas (StepOperations) or as they
    were traced (TracedOperations).

    stream_bytes  of what a stage of a pipeline gives to the next
    launched      blocks of the calibrated network that the host launches as much for in a phase
    """

    @property
    def spec(self) -> Any: ...
    @property
    def how(self) -> Arithmetic: ...
    @property
    def blocks(self) -> range: ...
    @property
    def stream_bytes(self) -> float: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def units(self) -> Mapping[str, int]: ...
    @property
    def block_matrices(self) -> list[int]: ...
    @property
    def end_matrices(self) -> list[int]: ...
    def launched(self, phase: str) -> float: ...
    def forward(self) -> Iterator[Term]: ...
    def backward(self) -> Iterator[Term]: ...
    def groups(self, phase: str, host: Launching) -> Iterator[LaunchGroup]: ...
    def optimizer(self, numel: float) -> Term: ...


class DataParallelCost:
    """What a way of data parallel training adds to a step; this one nothing.

    every_pass  gradients are sent in each of several passes, not in the last alone
    """

    every_pass = False

    def begin(self) -> None:
        """Called before each forward and backward."""

    def before(self, program: Program, phase: str, group: LaunchGroup) -> None:
        """Called before a group is computed."""

    def after_term(self, program: Program, name: str, term: Term, place: int) -> None:
        """Called in backward when the work at `place`, of the term, is in the program."""

    def after(self, program: Program, phase: str, group: LaunchGroup) -> None:
        """Called when a group is computed."""

    def after_backward(self, program: Program) -> None:
        """Called when the last group of backward is computed: what is left to send."""

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        term = operations.optimizer(operations.num_parameters)
        program.compute(term.name, prices.us(term), term.operation)


@dataclasses.dataclass(frozen=True)
class RankStep:
    """What a rank computes, at what prices."""

    operations: Operations
    prices: Prices
    host: dict[str, Launching]

    def program(self, axis: DataParallelCost, *, passes: int = 1, phases: str = "step") -> Program:
        """Forward and backward, `passes` times, then the optimizer; or as the `phases` of a
        WorkSpec say.
        """
        program = Program()
        for number in range(passes):
            axis.begin()
            self._forward(program, axis)
            sends = axis.every_pass or number == passes - 1
            if phases != "forward":
                self._backward(program, axis if sends else DataParallelCost())
        if phases == "step":
            program.host("optimizer", self._optimizer_us())
            axis.optimizer(program, self.operations, self.prices)
            program.end("optimizer")
        return program

    def _optimizer_us(self) -> float:
        return self.host["optimizer"].us(self.operations.launched("optimizer"))

    def _forward(self, program: Program, axis: DataParallelCost) -> None:
        for group in self.groups("forward"):
            axis.before(program, "forward", group)
            self._run(program, group)
            axis.after(program, "forward", group)
        program.end("forward")

    def _backward(self, program: Program, axis: DataParallelCost) -> None:
        for group in self.groups("backward"):
            axis.before(program, "backward", group)
            self._run(program, group, axis)
            axis.after(program, "backward", group)
        axis.after_backward(program)
        program.end("backward")

    def groups(self, phase: str) -> Iterator[LaunchGroup]:
        """In the order in which they are computed."""
        return self.operations.groups(phase, self.host[phase])

    def _run(
        self, program: Program, group: LaunchGroup, axis: DataParallelCost | None = None
    ) -> None:
        launch_us = group.host_us / max(1, len(group.terms)) if group.one_by_one else 0.0
        program.host(group.name, group.host_us - launch_us * len(group.terms))
        computed: list[tuple[str, Term]] = []
        for term in group.terms:
            name, us = f"{group.name}.{term.name}", self.prices.us(term)
            program.host(name, launch_us)
            if term.axis:
                program.wait(program.send(name, term.axis, us, term.operation))
                continue
            place = program.compute(name, us, term.operation)
            computed.append((name, term))
            if axis is not None and not self.operations.how.is_compiled:
                axis.after_term(program, name, term, place)
        if axis is not None and self.operations.how.is_compiled and computed:
            for name, term in computed:  # a compiled block gives its gradients when it has ended
                axis.after_term(program, name, term, place)
