"""The lives of storages as figures: what is held when and by whom, at the peak and for backward."""

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


@dataclasses.dataclass(frozen=True)
class MemoryState:
    """What is held after one event of the allocator, by category."""

    event: int
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


@dataclasses.dataclass(frozen=True)
class MemoryTimeline:
    """moments of the phases that were asked for, the peak of each, and whose bytes they are."""

    moments: Sequence[MemoryState]
    phases: Sequence[Phase]
    allocations: Sequence[Allocation]
    bytes_of: Mapping[Allocation, int]  # as the allocator counts them
    reserved: int

    @property
    def peak(self) -> MemoryState:
        return max(self.moments, key=lambda moment: moment.total)

    def peak_of(self, phase: Phase) -> int:
        """Of the phase, with what was held when it began."""
        return max(
            (m.total for m in self.moments if phase.start - 1 <= m.event <= phase.end), default=0
        )

    def most_of(self, *categories: str) -> int:
        """Bytes of the categories together, at most, in forward and backward."""
        passes = [phase for phase in self.phases if phase.name in ("forward", "backward")]
        most = 0
        for moment in self.moments:
            if any(phase.start <= moment.event <= phase.end for phase in passes):
                most = max(most, sum(moment.held.get(category, 0) for category in categories))
        return most

    def holders(self, event: int) -> list[tuple[str, str, str, str, str, int, int]]:
        """What lives after the event: (category, module, operator, line, phase, tensors, bytes),
        most bytes first.

        The same place in every block is one row.
        """
        alive = [
            a for a in self.allocations if a.born <= event and (a.died is None or a.died > event)
        ]
        places = ((a.category, general(a.module), a.operator, a.line, a.phase) for a in alive)
        return _summed(places, [self.bytes_of[a] for a in alive])

    def saved_for_backward(self) -> list[Allocation]:
        """Activations that live when the last forward phase ends."""
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
        """At most SERIES_POINTS moments, of each stretch the highest, so that no peak is lost."""
        stretch = ceil_div(len(self.moments), SERIES_POINTS)
        return [
            max(self.moments[start : start + stretch], key=lambda m: m.total)
            for start in range(0, len(self.moments), stretch)
        ]


def memory_timeline(
    allocations: Sequence[Allocation], phases: Sequence[Phase], *, caching: bool
) -> MemoryTimeline:
    """The timeline of adjacent phases; `caching` counts bytes as the CUDA allocator does."""
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
    births = [(a.born, 0, i, a, True) for i, a in enumerate(allocations)]
    deaths = [(a.died, 1, i, a, False) for i, a in enumerate(allocations) if a.died is not None]
    for event, _, _, allocation, is_birth in sorted(births + deaths):
        yield event, allocation, is_birth


def block_of(path: str) -> str:
    """A module's repeated part: "blocks.3" of "blocks.3.attention.output"; "" outside of all."""
    found = NUMBER.search(path)
    return path[: found.end()] if found else ""


def general(path: str) -> str:
    """The path with its numbers as *: equal for the same place in every block."""
    return NUMBER.sub("*", path)


def by_block(saved: Sequence[Allocation], bytes_of: Mapping[Allocation, int]) -> dict[str, int]:
    """Bytes kept for backward by repeated part, in the order of the forward pass."""
    sums: dict[str, int] = collections.defaultdict(int)
    for allocation in saved:
        sums[block_of(keeper(allocation))] += bytes_of[allocation]
    return dict(sums)


def savers(
    saved: Sequence[Allocation], bytes_of: Mapping[Allocation, int]
) -> list[tuple[str, str, str, int, int]]:
    """(keeper, operator that made, line, how many, bytes), most bytes first, blocks together."""
    places = ((general(keeper(a)), a.operator, a.line) for a in saved)
    return _summed(places, [bytes_of[a] for a in saved])


def _summed(places: Iterable[Any], sizes: Sequence[int]) -> list[Any]:
    """(*place, how many, bytes) of equal places, the most bytes first."""
    groups: dict[Any, list[int]] = collections.defaultdict(list)
    for place, size in zip(places, sizes, strict=True):
        groups[place].append(size)
    return sorted(
        ((*place, len(found), sum(found)) for place, found in groups.items()),
        key=lambda row: -row[-1],
    )


def keeper(allocation: Allocation) -> str:
    """The module whose backward wants it; of a checkpoint's input or a loss, its maker."""
    return allocation.saver or allocation.module
