"""Ways to bring one host tensor to every GPU, as data: lists of moves that one engine executes.

A tensor lies on the host. A move takes a range of it from one place to another; it may begin when
the moves that brought that range to its source have ended. Moves between the same two places follow
one another.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar

from stepgauge.spec.fields import check, option

HOST = "host"  # memory as it comes
PINNED = "pinned"  # the same tensor in page-locked memory
STAGING = "staging"  # page-locked memory of two blocks, through which the tensor goes
Place = str | int  # one of these, or the index of a GPU


@dataclasses.dataclass(frozen=True)
class Move:
    """Bytes `start` to `stop` of the tensor from one place to another.

    after   indices of moves that must have ended
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
    """The moves; `one_by_one`: each waits for the last."""

    moves: list[Move]
    one_by_one: bool = False


def naive(size: int, gpus: int, block: int) -> BroadcastPlan:
    """The whole tensor to each GPU, one GPU after another, from memory as it comes."""
    return BroadcastPlan([Move(HOST, g, 0, size) for g in range(gpus)], one_by_one=True)


def pinned(size: int, gpus: int, block: int) -> BroadcastPlan:
    """The whole tensor to each GPU at once, a stream each, from page-locked memory."""
    return BroadcastPlan([Move(PINNED, g, 0, size) for g in range(gpus)])


def staged(size: int, gpus: int, block: int) -> BroadcastPlan:
    """A block goes to all GPUs from one page-locked buffer while the next fills another."""
    moves: list[Move] = []
    sent: list[tuple[int, ...]] = []  # by block, its moves to the GPUs
    for number, (start, stop) in enumerate(_blocks(size, block)):
        free = sent[number - 2] if number >= 2 else ()
        moves.append(Move(HOST, STAGING, start, stop, free))
        filled = len(moves) - 1
        moves += [Move(STAGING, g, start, stop, (filled,)) for g in range(gpus)]
        sent.append(tuple(range(filled + 1, filled + 1 + gpus)))
    return BroadcastPlan(moves)


def chain(size: int, gpus: int, block: int) -> BroadcastPlan:
    """Each block once over a host link to GPU 0, and on from GPU to GPU while the next comes in."""
    moves: list[Move] = []
    for start, stop in _blocks(size, block):
        moves.append(Move(PINNED, 0, start, stop))
        for g in range(1, gpus):
            moves.append(Move(g - 1, g, start, stop, (len(moves) - 1,)))
    return BroadcastPlan(moves)


def tree(size: int, gpus: int, block: int) -> BroadcastPlan:
    """Each block over one host link to GPU 0, then along a binomial tree as the next comes in."""
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
    """Each GPU takes its part over its own host link and hands each block to the others."""
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
BLOCKLESS = ("naive", "pinned")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BroadcastSpec:
    """One row of `bench broadcast`: one schedule with one block size."""

    kind: ClassVar[str] = "broadcast"

    schedule: str = option(
        "scatter-gather", "the way from the host to all GPUs", choices=SCHEDULES, label=True
    )
    size_bytes: int = option(
        1 << 30,
        "bytes of the host tensor; 512M, 1G are powers of 1024",
        least=1,
        flag="size",
        label=True,
    )
    block_bytes: int = option(
        32 << 20, "bytes of a block, where there are blocks", least=1, flag="block"
    )
    gpus: int = option(
        2, "GPUs that get the tensor; on a CPU, parts of its memory", least=1, most=64, label=True
    )
    repeats: int = option(16, "timed runs", least=1, most=100_000)
    warmup: int = option(2, "untimed runs first", least=0, most=1000)
    device: str = option("cpu", "cpu or cuda; auto takes the fastest there is")

    def __post_init__(self) -> None:
        check(self)

    def plan(self) -> BroadcastPlan:
        return SCHEDULES[self.schedule](self.size_bytes, self.gpus, self.block_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What the links give alone, in bytes a second.

    host_link    the host to one GPU
    host_links   the host to all GPUs at once, each its own part, together
    peer_link    one GPU to another; 0 where there is one GPU only
    host_copy    from memory as it comes to page-locked memory
    """

    host_link: float
    host_links: float
    peer_link: float
    host_copy: float

    def best(self, other: "Rates") -> "Rates":
        """The larger of each."""
        names = [field.name for field in dataclasses.fields(self)]
        return Rates(**{name: max(getattr(self, name), getattr(other, name)) for name in names})

    def bound_s(self, schedule: BroadcastPlan) -> float:
        """No run can be shorter: the busiest link needs as long for its bytes."""
        from_host: Counter[Place] = Counter()  # bytes by the GPU that they go to
        sent: Counter[Place] = Counter()  # to other GPUs, by the GPU that they leave
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
