"""Schedules that copy one host tensor to every GPU, as data: lists of moves for one engine.

A move copies a byte range of the tensor from one place to another. It may begin as soon as the
moves that brought the range to its source have ended. Moves between the same two places run one
after another.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar

from stepgauge.spec.fields import check, option

HOST = "host"  # pageable memory
PINNED = "pinned"  # the same tensor in page-locked memory
STAGING = "staging"  # a page-locked double buffer of two blocks
Place = str | int  # one of these three, or the index of a GPU


@dataclasses.dataclass(frozen=True)
class Move:
    """Copies bytes `start` to `stop` of the tensor from one place to another.

    after   indices of moves that must have ended before this one begins
    """

    source: Place
    target: Place
    start: int
    stop: int
    after: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class BroadcastPlan:
    """The moves of a schedule. With `one_by_one` each move waits for the previous one."""

    moves: list[Move]
    one_by_one: bool = False


def naive(size: int, gpus: int, block: int) -> BroadcastPlan:
    """Copies the whole tensor to one GPU after another, from pageable memory."""
    return BroadcastPlan([Move(HOST, g, 0, size) for g in range(gpus)], one_by_one=True)


def pinned(size: int, gpus: int, block: int) -> BroadcastPlan:
    """Copies the whole tensor to all GPUs at once, one stream each, from page-locked memory."""
    return BroadcastPlan([Move(PINNED, g, 0, size) for g in range(gpus)])


def staged(size: int, gpus: int, block: int) -> BroadcastPlan:
    """Copies a block to all GPUs from one page-locked buffer while the next fills the other."""
    moves: list[Move] = []
    sent: list[tuple[int, ...]] = []  # for each block, the indices of its moves to the GPUs
    for number, (start, stop) in enumerate(_blocks(size, block)):
        free = sent[number - 2] if number >= 2 else ()
        moves.append(Move(HOST, STAGING, start, stop, free))
        filled = len(moves) - 1
        moves += [Move(STAGING, g, start, stop, (filled,)) for g in range(gpus)]
        sent.append(tuple(range(filled + 1, filled + 1 + gpus)))
    return BroadcastPlan(moves)


def chain(size: int, gpus: int, block: int) -> BroadcastPlan:
    """Copies each block to GPU 0 and on from GPU to GPU, while the next block comes in."""
    moves: list[Move] = []
    for start, stop in _blocks(size, block):
        moves.append(Move(PINNED, 0, start, stop))
        for g in range(1, gpus):
            moves.append(Move(g - 1, g, start, stop, (len(moves) - 1,)))
    return BroadcastPlan(moves)


def tree(size: int, gpus: int, block: int) -> BroadcastPlan:
    """Copies each block to GPU 0 and along a binomial tree of GPUs, while the next comes in."""
    moves: list[Move] = []
    for start, stop in _blocks(size, block):
        moves.append(Move(PINNED, 0, start, stop))
        arrival = {0: len(moves) - 1}
        while len(arrival) < gpus:
            for parent in list(arrival):
                child = len(arrival)
                if child < gpus:
                    moves.append(Move(parent, child, start, stop, (arrival[parent],)))
                    arrival[child] = len(moves) - 1
    return BroadcastPlan(moves)


def scatter_gather(size: int, gpus: int, block: int) -> BroadcastPlan:
    """Copies a part to each GPU over its own host link; GPUs pass their blocks to each other."""
    moves: list[Move] = []
    bounds = [size * g // gpus for g in range(gpus + 1)]
    parts = [_blocks(bounds[g + 1] - bounds[g], block, bounds[g]) for g in range(gpus)]
    for number in range(max(map(len, parts))):
        for g, blocks in enumerate(parts):
            if number < len(blocks):
                start, stop = blocks[number]
                moves.append(Move(PINNED, g, start, stop))
                arrived = len(moves) - 1
                moves += [Move(g, (g + k) % gpus, start, stop, (arrived,)) for k in range(1, gpus)]
    return BroadcastPlan(moves)


def _blocks(size: int, block: int, offset: int = 0) -> list[tuple[int, int]]:
    return [(offset + start, offset + min(size, start + block)) for start in range(0, size, block)]


SCHEDULES: Mapping[str, Callable[[int, int, int], BroadcastPlan]] = {
    "naive": naive,
    "pinned": pinned,
    "staged": staged,
    "chain": chain,
    "tree": tree,
    "scatter-gather": scatter_gather,
}
BLOCKLESS = ("naive", "pinned")  # schedules that ignore the block size


@dataclasses.dataclass(frozen=True, kw_only=True)
class BroadcastSpec:
    """One row of `bench broadcast`: one schedule with one block size."""

    kind: ClassVar[str] = "broadcast"

    schedule: str = option(
        "scatter-gather", "How the tensor gets to all GPUs", choices=SCHEDULES, label=True
    )
    size_bytes: int = option(
        1 << 30,
        "Bytes of the tensor, such as 512M or 1G (powers of 1024)",
        least=1,
        flag="size",
        label=True,
    )
    block_bytes: int = option(
        32 << 20, "Bytes per block, for schedules that use blocks", least=1, flag="block"
    )
    gpus: int = option(
        2,
        "Number of GPUs that receive the tensor; on a CPU, copies in its memory",
        least=1,
        most=64,
        label=True,
    )
    repeats: int = option(16, "Timed runs", least=1, most=100_000)
    warmup: int = option(2, "Warm-up runs, not timed", least=0, most=1000)
    device: str = option("cpu", "cpu, cuda, or auto for the fastest available")

    def __post_init__(self) -> None:
        check(self)

    def plan(self) -> BroadcastPlan:
        return SCHEDULES[self.schedule](self.size_bytes, self.gpus, self.block_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured bandwidth of each link when nothing else runs, in bytes per second.

    host_link    from the host to one GPU
    host_links   from the host to all GPUs at once, each receiving its own part: the sum
    peer_link    from one GPU to another; 0 if there is only one GPU
    host_copy    from pageable to page-locked memory
    """

    host_link: float
    host_links: float
    peer_link: float
    host_copy: float

    def best(self, other: "Rates") -> "Rates":
        """Returns the larger value of each field."""
        names = [field.name for field in dataclasses.fields(self)]
        return Rates(**{name: max(getattr(self, name), getattr(other, name)) for name in names})

    def bound_s(self, schedule: BroadcastPlan) -> float:
        """Returns a lower bound on the duration, in seconds: what the busiest link takes."""
        from_host: Counter[Place] = Counter()  # bytes received from the host, by GPU
        sent: Counter[Place] = Counter()  # bytes sent to other GPUs, by GPU
        received: Counter[Place] = Counter()
        copied = 0
        for move in schedule.moves:
            if move.target == STAGING:
                copied += move.bytes
            if not _on_host(move.source):
                sent[move.source] += move.bytes
                received[move.target] += move.bytes
            elif not _on_host(move.target):
                from_host[move.target] += move.bytes
        seconds = [
            max(from_host.values()) / self.host_link,
            from_host.total() / self.host_links,
        ]
        if schedule.one_by_one:
            seconds.append(from_host.total() / self.host_link)
        if copied:
            seconds.append(copied / self.host_copy)
        for nbytes in (*sent.values(), *received.values()):
            seconds.append(nbytes / self.peer_link)
        return max(seconds)


def _on_host(place: Place) -> bool:
    return isinstance(place, str)
