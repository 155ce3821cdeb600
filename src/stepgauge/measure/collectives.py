"""Runs, checks and times a collective."""

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.measure.copied import CheckedCopies
from stepgauge.measure.devices import synchronize
from stepgauge.measure.known_values import differing, pattern, tile
from stepgauge.measure.ring import Ring
from stepgauge.measure.timing import clock_of
from stepgauge.parallel.communication.collectives import (
    all_gather_flat,
    group_with_backend,
    reduce_scatter_flat,
)
from stepgauge.runtime.recording import record
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.comm import COPIES, IN_PLACE, ROOT, CommSpec
from stepgauge.trace.collector import without_collector

LEAST_BATCHES, MOST_BATCHES = 5, 200


class Runnable(Protocol):
    """A collective of a spec on this rank, which can be run and checked.

    sent_bytes  bytes that our own ring has sent so far
    """

    spec: CommSpec
    device: torch.device

    @property
    def run(self) -> Callable[[], object]: ...
    @property
    def sent_bytes(self) -> int: ...
    def wrong(self) -> int: ...


def collective_of(spec: CommSpec, device: torch.device) -> Runnable:
    """Returns the spec's collective. All ranks must call it. Raises ValueError if copies cannot reach."""
    return CheckedCopies(spec, device) if spec.backend == COPIES else Collective(spec, device)


class Collective:
    """The collective of a spec on this rank, with its tensors on the device. If the library works in
    place, `input` and `output` are the same tensor. `run` runs the collective.
    """

    def __init__(self, spec: CommSpec, device: torch.device):
        self.spec, self.device = spec, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # The default group uses NCCL for GPU tensors, so Gloo needs a separate group.
        needs_gloo = spec.backend == "gloo" and device.type == "cuda"
        self.group = group_with_backend("gloo") if needs_gloo else dist.group.WORLD
        self.ring = Ring(self.group)
        part = spec.count // self.size
        self.input = self._empty(part if spec.op in ("gather", "all_gather") else spec.count)
        if spec.op in IN_PLACE:
            self.output = self.input
        else:
            self.output = self._empty(
                part if spec.op in ("scatter", "reduce_scatter") else spec.count
            )
        self.run = self._ring_call() if spec.algorithm == "ring" else self._call()

    @property
    def sent_bytes(self) -> int:
        return self.ring.sent_bytes

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=getattr(torch, self.spec.dtype), device=self.device)

    def _ring_call(self) -> Callable[[], object]:
        """Returns a call of our own ring."""
        input, output = self.input, self.output
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: self.ring.all_reduce(output),
            "all_gather": lambda: self.ring.all_gather(output, input),
            "reduce_scatter": lambda: output.copy_(self.ring.reduce_scatter(input)),
        }
        return calls[self.spec.op]

    def _call(self) -> Callable[[], object]:
        """Returns a call of the library's collective."""
        input, output, group = self.input, self.output, self.group
        calls: dict[str, Callable[[], object]] = {
            "broadcast": lambda: dist.broadcast(output, ROOT, group=group),
            "reduce": lambda: dist.reduce(output, ROOT, group=group),
            "all_reduce": lambda: dist.all_reduce(output, group=group),
            "gather": lambda: dist.gather(input, self._at_root(output), ROOT, group=group),
            "all_gather": lambda: all_gather_flat(output, input, group=group),
            "scatter": lambda: dist.scatter(output, self._at_root(input), ROOT, group=group),
            "reduce_scatter": lambda: reduce_scatter_flat(output, input, group=group),
            "all_to_all": lambda: dist.all_to_all_single(output, input, group=group),
            "send_recv": self._send_to_next,
            "barrier": lambda: dist.barrier(group=group),
        }
        return calls[self.spec.op]

    def _at_root(self, whole: Tensor) -> list[Tensor] | None:
        """Returns a part for each rank at the root, and None on other ranks, as torch requires."""
        return list(whole.chunk(self.size)) if self.rank == ROOT else None

    def _send_to_next(self) -> None:
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        transfers = [
            dist.P2POp(dist.isend, self.input, group=self.group, group_peer=following),
            dist.P2POp(dist.irecv, self.output, group=self.group, group_peer=previous),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()

    def wrong(self) -> int:
        """Runs the collective on known values and returns the number of wrong elements on all ranks."""
        if self.spec.op == "barrier":
            return 0
        if self.output is not self.input:
            self.output.fill_(-1)
        offset = self.rank * self.input.numel() if self.spec.op in ("gather", "all_gather") else 0
        tile(self.input, pattern(self.rank, self.device), offset)
        self.run()
        synchronize(self.device)
        return sum(gathered_objects(self._wrong_on_this_rank()))

    def _wrong_on_this_rank(self) -> int:
        """Compares the output with what this rank should have, derived from the ranks' patterns."""
        op, count = self.spec.op, self.output.numel()
        if op in ("reduce", "gather") and self.rank != ROOT:
            return 0
        total = sum(
            (pattern(rank, self.device) for rank in range(self.size)),
            torch.zeros(1, device=self.device),
        )
        match op:
            case "all_reduce" | "reduce":
                return differing(self.output, total, 0)
            case "reduce_scatter":
                return differing(self.output, total, self.rank * count)
            case "broadcast":
                return differing(self.output, pattern(ROOT, self.device), 0)
            case "scatter":
                return differing(self.output, pattern(ROOT, self.device), self.rank * count)
            case "send_recv":
                return differing(self.output, pattern((self.rank - 1) % self.size, self.device), 0)
        # The part of source rank s: in gather and all_gather its whole input, in all_to_all the part
        # of its input that is for this rank.
        wrong = 0
        for source, part in enumerate(self.output.chunk(self.size)):
            offset = (self.rank if op == "all_to_all" else source) * part.numel()
            wrong += differing(part, pattern(source, self.device), offset)
        return wrong


def time_collective(collective: Runnable) -> tuple[list[float], int]:
    """Returns ms per operation, one value per batch, and the number of operations in a batch.

    The spec's timing decides how a batch is timed:
    pipelined  its operations are launched without waiting, and its time is divided by their number
    blocking   one operation and the wait for its end, on the host's clock
    graph      the replay of a CUDA graph that holds its operations

    Each batch follows an untimed operation, so that all ranks start it together. All ranks time the
    same number of batches.
    """
    spec = collective.spec
    for _ in range(max(1, spec.warmup)):
        collective.run()
    own_ms = statistics.median(_batch(collective.run, 1, collective.device) for _ in range(2))
    estimate_ms = max(*gathered_objects(own_ms), 1e-3)  # of all ranks, so that they decide alike
    budget_ms = spec.seconds * 1e3
    operations = 1
    if spec.timing != "blocking":
        operations = max(1, min(spec.iterations, int(budget_ms / LEAST_BATCHES / estimate_ms)))
    batches = max(LEAST_BATCHES, min(MOST_BATCHES, int(budget_ms / (operations * estimate_ms))))
    if spec.timing == "graph":
        return _time_graph(collective, operations, batches), operations
    with without_collector():
        if spec.timing == "blocking":
            return [_blocking(collective.run, collective.device) for _ in range(batches)], 1
        times = [_batch(collective.run, operations, collective.device) for _ in range(batches)]
    return times, operations


def _batch(run: Callable[[], object], operations: int, device: torch.device) -> float:
    run()
    (milliseconds,) = clock_of(device)({"batch": _repeat(run, operations)}, device)
    return milliseconds / operations


def _repeat(run: Callable[[], object], operations: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(operations):
            run()

    return repeated


def _blocking(run: Callable[[], object], device: torch.device) -> float:
    run()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _time_graph(collective: Runnable, operations: int, batches: int) -> list[float]:
    _, replay = record(_repeat(collective.run, operations), collective.device)
    times = [_batch(replay, 1, collective.device) / operations for _ in range(batches)]
    del replay  # frees the graph before the communicator that it uses
    return times
