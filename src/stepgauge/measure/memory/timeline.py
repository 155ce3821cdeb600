"""Turns tracked allocations into figures: memory over time by category, at the peak and for backward."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepgauge.cost.memory.allocator import Block, CachingAllocator
from stepgauge.measure.memory.storage_tracker import Allocation, Phase
from stepgauge.spec.memory import ACTIVATIONS, CATEGORIES
from stepgauge.spec.units import ceil_div

SERIES_POINTS = 1500
LARGEST = 20
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
LAYER_OF_SEQUENTIAL = re.compile(r"\d+\.[^.]*$")


@dataclasses.dataclass(frozen=True)
class MemoryState:
    """The bytes that are held after one event of the allocator, by category."""

    event: int
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


@dataclasses.dataclass(frozen=True)
class MemoryTimeline:
    """Memory over the events of adjacent phases.

    allocations  all allocations of the run
    bytes_of     bytes of each allocation, as the allocator counts them
    reserved     the most bytes that the caching allocator reserved; 0 without one
    """

    moments: Sequence[MemoryState]
    phases: Sequence[Phase]
    allocations: Sequence[Allocation]
    bytes_of: Mapping[Allocation, int]
    reserved: int

    @property
    def peak(self) -> MemoryState:
        return max(self.moments, key=lambda moment: moment.total)

    def peak_of(self, phase: Phase) -> int:
        """Returns the most bytes held during the phase, including its start."""
        return max(
            (m.total for m in self.moments if phase.start - 1 <= m.event <= phase.end), default=0
        )

    def most_of(self, *categories: str) -> int:
        """Returns the most bytes that the categories hold together during forward and backward."""
        passes = [phase for phase in self.phases if phase.name in ("forward", "backward")]
        most = 0
        for moment in self.moments:
            if any(phase.start <= moment.event <= phase.end for phase in passes):
                most = max(most, sum(moment.held.get(category, 0) for category in categories))
        return most

    def holders(self, event: int) -> list[tuple[str, str, str, str, str, int, int]]:
        """Returns what is held after the event: (category, module, operator, line, phase, tensors,
        bytes), most bytes first. Equal places in different blocks are one row.
        """
        alive = [
            a for a in self.allocations if a.born <= event and (a.died is None or a.died > event)
        ]
        places = ((a.category, general(a.module), a.operator, a.line, a.phase) for a in alive)
        return _summed(places, [self.bytes_of[a] for a in alive])

    def saved_for_backward(self) -> list[Allocation]:
        """Returns the activations that are held when the last forward phase ends."""
        ends = [phase.end for phase in self.phases if phase.name == "forward"]
        if not ends:
            return []
        return [
            a
            for a in self.allocations
            if a.category == ACTIVATIONS
            and a.born < ends[-1]
            and (a.died is None or a.died >= ends[-1])
        ]

    def thinned(self) -> list[MemoryState]:
        """Returns at most SERIES_POINTS moments: the highest of each stretch, so that no peak is lost."""
        stretch = ceil_div(len(self.moments), SERIES_POINTS)
        return [
            max(self.moments[start : start + stretch], key=lambda m: m.total)
            for start in range(0, len(self.moments), stretch)
        ]


def memory_timeline(
    allocations: Sequence[Allocation], phases: Sequence[Phase], *, caching: bool
) -> MemoryTimeline:
    """Returns the timeline of adjacent phases.

    caching  count bytes as the CUDA caching allocator does
    """
    allocator = CachingAllocator()
    blocks: dict[Allocation, Block] = {}
    bytes_of: dict[Allocation, int] = {}
    held = dict.fromkeys(CATEGORIES, 0)
    moments: list[MemoryState] = []
    first, last = phases[0].start, phases[-1].end
    for event, allocation, is_birth in _events(allocations):
        if event >= first and not moments:
            moments.append(MemoryState(event - 1, dict(held)))
        if is_birth:
            if caching:
                blocks[allocation] = allocator.allocate(allocation.bytes)
            bytes_of[allocation] = blocks[allocation].size if caching else allocation.bytes
            held[allocation.category] += bytes_of[allocation]
        else:
            held[allocation.category] -= bytes_of[allocation]
            if caching:
                allocator.free(blocks.pop(allocation))
        if first <= event < last:
            moments.append(MemoryState(event, dict(held)))
    return MemoryTimeline(
        moments or [MemoryState(first, dict(held))],
        phases,
        allocations,
        bytes_of,
        allocator.peak_reserved,
    )


def _events(allocations: Sequence[Allocation]) -> Iterator[tuple[int, Allocation, bool]]:
    """Yields (event, allocation, is it its birth) in order."""
    births = [(a.born, 0, i, a, True) for i, a in enumerate(allocations)]
    deaths = [(a.died, 1, i, a, False) for i, a in enumerate(allocations) if a.died is not None]
    for event, _, _, allocation, is_birth in sorted(births + deaths):
        yield event, allocation, is_birth


def block_of(path: str) -> str:
    """Returns the block of a module's path: "blocks.3" for "blocks.3.attention.output", or ""."""
    number = NUMBER.search(path)
    return path[: number.end()] if number else ""


def general(path: str) -> str:
    """Replaces the numbers of a path by *, so that equal places in all blocks have the same path.

    Layers of a plain nn.Sequential are no blocks, and keep their numbers: "0.weight" and "2.weight".
    """
    return path if LAYER_OF_SEQUENTIAL.match(path) else NUMBER.sub("*", path)


def by_block(saved: Sequence[Allocation], bytes_of: Mapping[Allocation, int]) -> dict[str, int]:
    """Returns the bytes kept for backward by block, in the order of the forward."""
    sums: dict[str, int] = collections.defaultdict(int)
    for allocation in saved:
        sums[block_of(keeper(allocation))] += bytes_of[allocation]
    return dict(sums)


def savers(
    saved: Sequence[Allocation], bytes_of: Mapping[Allocation, int]
) -> list[tuple[str, str, str, int, int]]:
    """Returns (keeper, operator, line, tensors, bytes), most bytes first, with equal places in all
    blocks as one row.
    """
    places = ((general(keeper(a)), a.operator, a.line) for a in saved)
    return _summed(places, [bytes_of[a] for a in saved])


def _summed(places: Iterable[Any], sizes: Sequence[int]) -> list[Any]:
    """Returns (*place, number, bytes) of equal places, most bytes first."""
    groups: dict[Any, list[int]] = collections.defaultdict(list)
    for place, size in zip(places, sizes, strict=True):
        groups[place].append(size)
    rows = ((*place, len(group), sum(group)) for place, group in groups.items())
    return sorted(rows, key=lambda row: -row[-1])


def keeper(allocation: Allocation) -> str:
    """Returns the module whose backward needs the tensor, or the module that made it, as for a
    checkpoint's input or a loss.
    """
    return allocation.saver or allocation.module
