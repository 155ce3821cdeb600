"""A rank's step, written down as work on its streams: the host, the device, and each communicator.

Outside of blocks, the host's time comes before the group's first operation, because most of it is
spent before the first launch. Within a block, the host launches one operation after the other. The
device runs them in order. It waits for each collective of a tensor or context axis before it
continues.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.terms import Arithmetic, Term
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.events import COMPUTE, HOST, StreamWork

TENSOR, DATA = "tensor", "data"  # communicators; each is a stream


class Program:
    """The work of a step, in the order in which it is added. Methods return the work's index."""

    def __init__(self) -> None:
        self.works: list[StreamWork] = []
        self.ends: dict[str, int] = {}  # phase: index of the work that ends it
        self._awaited: list[int] = []  # what the next computation waits for

    def add(self, work: StreamWork) -> int:
        self.works.append(work)
        return len(self.works) - 1

    def host(self, name: str, us: float) -> None:
        """Adds work of the host that the next computation waits for."""
        if us > 0:
            self.wait(self.add(StreamWork(name, HOST, us)))

    def compute(self, name: str, us: float, operation: str = "") -> int:
        after, self._awaited = tuple(self._awaited), []
        return self.add(StreamWork(name, COMPUTE, us, operation, after))

    def call(self, name: str, us: float) -> tuple[int, ...]:
        """Adds the host's call of a collective, during which the device computes what it has."""
        return (self.add(StreamWork(name, HOST, us)),) if us > 0 else ()

    def send(
        self, name: str, stream: str, us: float, operation: str, *, after: int = -1,
        called: tuple[int, ...] = (),
    ) -> int:  # fmt: skip
        """Adds a collective that starts after the work `after` (-1: the last computation) and `called`."""
        after = after if after >= 0 else self.compute(f"{name} starts", 0.0)
        return self.add(StreamWork(name, stream, us, operation, (after, *called)))

    def wait(self, *works: int) -> None:
        """Lets the next computation wait for these."""
        self._awaited += works

    def end(self, phase: str) -> None:
        self.ends[phase] = self.compute(f"end of {phase}", 0.0)


@dataclasses.dataclass(frozen=True)
class LaunchCost:
    """The host's time for a phase in microseconds: per block, and for everything outside of blocks."""

    block_us: float = 0.0
    outside_us: float = 0.0

    def us(self, blocks: float) -> float:
        return max(0.0, self.outside_us + self.block_us * blocks)


@dataclasses.dataclass(frozen=True)
class LaunchGroup:
    """The terms of one block, or of what comes before or after the blocks.

    one_by_one  the host launches the terms one after the other while the device runs; otherwise all
                of `host_us` passes before the device gets the first one
    """

    name: str
    terms: Sequence[Term]
    host_us: float
    one_by_one: bool = False

    @property
    def gradients(self) -> int:
        """The number of parameters whose gradients are complete in this group."""
        return sum(1 for term in self.terms if term.gradient)


class Operations(Protocol):
    """What a rank runs, as terms: by formula (StepOperations) or traced (TracedOperations).

    stream_bytes  bytes that a pipeline stage hands to the next one, per micro-batch
    launched      the host's work in a phase, as a number of blocks of the calibrated network
    """

    @property
    def spec(self) -> Any: ...
    @property
    def share(self) -> NetworkPart: ...
    @property
    def arithmetic(self) -> Arithmetic: ...
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
    def groups(self, phase: str, host: LaunchCost) -> Iterator[LaunchGroup]: ...
    def optimizer(self, numel: float) -> Term: ...


class DataParallelCost:
    """What a data parallel wrapper adds to a step. This base class adds nothing.

    every_pass  gradients are reduced in each accumulated pass, not only in the last one
    """

    every_pass = False

    def begin(self) -> None:
        """Called before each forward and backward."""

    def before(self, program: Program, phase: str, group: LaunchGroup) -> None:
        """Called before a group is computed."""

    def after_term(self, program: Program, name: str, term: Term, computed: int) -> None:
        """Called in backward after each term, whose work has the index `computed`."""

    def after(self, program: Program, phase: str, group: LaunchGroup) -> None:
        """Called after a group is computed."""

    def after_backward(self, program: Program) -> None:
        """Called after the last group of backward, to send the rest."""

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        """Adds the update of the parameters."""
        term = operations.optimizer(operations.num_parameters)
        program.compute(term.name, prices.us(term), term.operation)


@dataclasses.dataclass(frozen=True)
class RankStep:
    """What a rank computes, what each operation takes, and what launching takes on the host."""

    operations: Operations
    prices: Prices
    host: dict[str, LaunchCost]

    def program(self, axis: DataParallelCost, *, phases: str = "step") -> Program:
        """Returns forward and backward, which reduces gradients, and the optimizer.

        `phases` as in WorkSpec: "forward" leaves out backward and optimizer, "backward" the optimizer.
        """
        program = Program()
        axis.begin()
        self._forward(program, axis)
        if phases != "forward":
            self._backward(program, axis)
        if phases == "step":
            launched = self.operations.launched("optimizer")
            program.host("optimizer", self.host["optimizer"].us(launched))
            axis.optimizer(program, self.operations, self.prices)
            program.end("optimizer")
        return program

    def earlier_pass(self, axis: DataParallelCost) -> Program:
        """Returns forward and backward of a pass before the last of an accumulated step."""
        program = Program()
        axis.begin()
        self._forward(program, axis)
        self._backward(program, axis if axis.every_pass else DataParallelCost())
        return program

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
        """Yields the launch groups in the order in which they are computed."""
        return self.operations.groups(phase, self.host[phase])

    def _run(
        self, program: Program, group: LaunchGroup, axis: DataParallelCost | None = None
    ) -> None:
        launch_us = group.host_us / max(1, len(group.terms)) if group.one_by_one else 0.0
        program.host(group.name, group.host_us - launch_us * len(group.terms))
        is_compiled = self.operations.arithmetic.is_compiled
        computations: list[tuple[str, Term]] = []
        index = -1
        for term in group.terms:
            name, us = f"{group.name}.{term.name}", self.prices.us(term)
            program.host(name, launch_us)
            if term.axis:
                program.wait(program.send(name, term.axis, us, term.operation))
                continue
            index = program.compute(name, us, term.operation)
            computations.append((name, term))
            if axis is not None and not is_compiled:
                axis.after_term(program, name, term, index)
        if axis is not None and is_compiled:  # a compiled block returns all gradients at its end
            for name, term in computations:
                axis.after_term(program, name, term, index)
