"""One collective on this rank: its tensors, its call, its check and its clock."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.measure.devices import synchronize
from stepgauge.measure.ring import Ring
from stepgauge.measure.timing import clock_of
from stepgauge.parallel.communication.collectives import (
    all_gather_flat,
    group_with_backend,
    reduce_scatter_flat,
)
from stepgauge.runtime.recording import record
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.comm import IN_PLACE, ROOT, CommSpec
from stepgauge.spec.units import ceil_div
from stepgauge.trace.collector import without_collector

# of the test pattern: a prime, so that no chunk of usual size can stand in for another
PERIOD = 1021
LEAST_BATCHES, MOST_BATCHES = 5, 200
_SLICE = 1 << 24  # elements checked at a time


class Collective:
    """The collective of a spec between all ranks, with tensors on the device.

    `given` is what this rank gives and `got` what it gets; where the library works in place they
    are the same tensor.
    """

    def __init__(self, spec: CommSpec, device: torch.device):
        self.spec, self.device = spec, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # The default group takes GPU tensors to NCCL; Gloo is asked for by a group of its own.
        needs_gloo = spec.backend == "gloo" and device.type == "cuda"
        self.group = group_with_backend("gloo") if needs_gloo else dist.group.WORLD
        self.ring = Ring(self.group)
        part = spec.count // self.size
        self.given = self._empty(part if spec.op in ("gather", "all_gather") else spec.count)
        if spec.op in IN_PLACE:
            self.got = self.given
        else:
            self.got = self._empty(part if spec.op in ("scatter", "reduce_scatter") else spec.count)
        self.run = self._ring_call() if spec.algorithm == "ring" else self._call()

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=getattr(torch, self.spec.dtype), device=self.device)

    def _ring_call(self) -> Callable[[], object]:
        """The collective by our own ring."""
        given, got = self.given, self.got
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: self.ring.all_reduce(got),
            "all_gather": lambda: self.ring.all_gather(got, given),
            "reduce_scatter": lambda: got.copy_(self.ring.reduce_scatter(given)),
        }
        return calls[self.spec.op]

    def _call(self) -> Callable[[], object]:
        """The collective by the library."""
        given, got, group = self.given, self.got, self.group
        calls: dict[str, Callable[[], object]] = {
            "broadcast": lambda: dist.broadcast(got, ROOT, group=group),
            "reduce": lambda: dist.reduce(got, ROOT, group=group),
            "all_reduce": lambda: dist.all_reduce(got, group=group),
            "gather": lambda: dist.gather(given, self._at_root(got), ROOT, group=group),
            "all_gather": lambda: all_gather_flat(got, given, group=group),
            "scatter": lambda: dist.scatter(got, self._at_root(given), ROOT, group=group),
            "reduce_scatter": lambda: reduce_scatter_flat(got, given, group=group),
            "all_to_all": lambda: dist.all_to_all_single(got, given, group=group),
            "send_recv": self._pass_on,
            "barrier": lambda: dist.barrier(group=group),
        }
        return calls[self.spec.op]

    def _at_root(self, whole: Tensor) -> list[Tensor] | None:
        """A part for each rank, which torch takes at the root alone."""
        return _parts(whole, self.size) if self.rank == ROOT else None

    def _pass_on(self) -> None:
        transfers = [
            dist.P2POp(
                dist.isend, self.given, group=self.group, group_peer=(self.rank + 1) % self.size
            ),
            dist.P2POp(
                dist.irecv, self.got, group=self.group, group_peer=(self.rank - 1) % self.size
            ),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()

    def wrong(self) -> int:
        """Elements, over all ranks, that a run on known values gets wrong."""
        if self.spec.op == "barrier":
            return 0
        if self.got is not self.given:
            self.got.fill_(-1)
        offset = self.rank * self.given.numel() if self.spec.op in ("gather", "all_gather") else 0
        _tile(self.given, self._pattern(self.rank), offset)
        self.run()
        synchronize(self.device)
        return sum(gathered_objects(self._wrong_here()))

    def _pattern(self, rank: int) -> Tensor:
        """What `rank` gives, over one period: small whole numbers, exact in every type."""
        return self._base().roll(37 * rank)

    def _base(self) -> Tensor:
        index = torch.arange(PERIOD, device=self.device)
        return (index * index * 7 + index * 3) % 11 % 4

    def _wrong_here(self) -> int:
        """What each rank should have: element i of the whole is patterns[...][i]."""
        op, count = self.spec.op, self.got.numel()
        if op in ("reduce", "gather") and self.rank != ROOT:
            return 0
        total = sum(
            (self._pattern(rank) for rank in range(self.size)), torch.zeros(1, device=self.device)
        )
        match op:
            case "all_reduce" | "reduce":
                return _differing(self.got, total, 0)
            case "reduce_scatter":
                return _differing(self.got, total, self.rank * count)
            case "broadcast":
                return _differing(self.got, self._pattern(ROOT), 0)
            case "scatter":
                return _differing(self.got, self._pattern(ROOT), self.rank * count)
            case "send_recv":
                return _differing(self.got, self._pattern((self.rank - 1) % self.size), 0)
        # gather, all_gather: part s is rank s's; all_to_all: part s is what rank s has for this
        # rank.
        parts = enumerate(_parts(self.got, self.size))
        where = {source: self.rank if op == "all_to_all" else source for source in range(self.size)}
        return sum(_differing(part, self._pattern(s), where[s] * part.numel()) for s, part in parts)


def _parts(tensor: Tensor, size: int) -> list[Tensor]:
    return list(tensor.chunk(size))


def _tile(tensor: Tensor, pattern: Tensor, offset: int) -> None:
    """tensor[i] = pattern[(offset + i) % PERIOD]."""
    for start in range(0, tensor.numel(), _SLICE):
        piece = tensor[start : start + _SLICE]
        turned = pattern.roll(-((offset + start) % PERIOD)).to(tensor.dtype)
        piece.copy_(turned.repeat(ceil_div(piece.numel(), PERIOD))[: piece.numel()])


def _differing(tensor: Tensor, pattern: Tensor, offset: int) -> int:
    expected = torch.empty(min(_SLICE, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
    found = 0
    for start in range(0, tensor.numel(), _SLICE):
        piece = tensor[start : start + _SLICE]
        _tile(expected[: piece.numel()], pattern, offset + start)
        found += int((piece != expected[: piece.numel()]).sum())
    return found


def time_collective(collective: Collective) -> tuple[list[float], int]:
    """Milliseconds of one operation, one value a batch, and the operations in a batch.

    pipelined  a batch's operations are enqueued without waiting, and its time is divided by their
               number
    blocking   a batch is one operation and the wait for its end, on the host's clock
    graph      a batch is the replay of one CUDA graph that holds its operations

    Each batch follows an untimed operation, so that ranks begin it together. All ranks time as
    many.
    """
    spec = collective.spec
    for _ in range(max(1, spec.warmup)):
        collective.run()
    estimate = _largest_of_ranks(
        statistics.median(_batch(collective.run, 1, collective.device) for _ in range(2))
    )
    budget = spec.seconds * 1e3
    operations = (
        1
        if spec.timing == "blocking"
        else max(1, min(spec.iterations, int(budget / LEAST_BATCHES / estimate)))
    )
    batches = max(LEAST_BATCHES, min(MOST_BATCHES, int(budget / (operations * estimate))))
    if spec.timing == "graph":
        return _time_graph(collective, operations, batches), operations
    clock = _blocking if spec.timing == "blocking" else _batch
    with without_collector():
        times = [clock(collective.run, operations, collective.device) for _ in range(batches)]
    return times, operations


def _largest_of_ranks(milliseconds: float) -> float:
    """The largest of all ranks, which therefore decide alike."""
    return max(*gathered_objects(milliseconds), 1e-3)


def _batch(run: Callable[[], object], operations: int, device: torch.device) -> float:
    run()
    (milliseconds,) = clock_of(device)({"batch": _several(run, operations)}, device)
    return milliseconds / operations


def _several(run: Callable[[], object], operations: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(operations):
            run()

    return several


def _blocking(run: Callable[[], object], operations: int, device: torch.device) -> float:
    run()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(operations):
        run()
        synchronize(device)
    return (time.perf_counter() - start) * 1e3 / operations


def _time_graph(collective: Collective, operations: int, batches: int) -> list[float]:
    _, replay = record(_several(collective.run, operations), collective.device)
    times = [_batch(replay, 1, collective.device) / operations for _ in range(batches)]
    del replay  # before the communicator that its graph holds
    return times
