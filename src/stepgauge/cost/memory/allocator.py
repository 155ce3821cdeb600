"""Simulates PyTorch's caching CUDA allocator: how much a sequence of allocations holds and reserves.

It follows c10/cuda/CUDACachingAllocator.cpp with default settings. Sizes are rounded up to 512 bytes.
A block of up to 1 MiB comes from a segment of 2 MiB, one of less than 10 MiB from a segment of 20 MiB,
and a larger one gets its own segment, rounded up to 2 MiB. The smallest free block that is large enough
is used. Its rest is split off, unless it is at most 1 MiB of a large block. Free neighbours are merged.
"""

import bisect
import dataclasses

from stepgauge.spec.units import MIB, round_up

ROUNDING = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LEAST_OWN_SEGMENT = 10 * MIB
SHARED_SEGMENT = 20 * MIB
SEGMENT_ROUNDING = 2 * MIB


@dataclasses.dataclass(eq=False)
class Block:
    """Part of a segment. While it is in use, `memory_allocated` counts its `size`."""

    address: int
    size: int
    small: bool
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False


class CachingAllocator:
    """`allocated` and `reserved` are torch.cuda.memory_allocated and memory_reserved."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_reserved = 0
        self._next_address = 0
        self._pools: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        """Returns a block of at least `size` bytes."""
        size = max(ROUNDING, round_up(size, ROUNDING))
        block = self._best_fit(size) or self._segment(size)
        rest = block.size - size
        if rest >= ROUNDING if block.small else rest > LARGEST_SMALL:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take(neighbour)
                block = self._merged(*sorted((block, neighbour), key=lambda b: b.address))
        self._give(block)

    def _best_fit(self, size: int) -> Block | None:
        pool = self._pools[size <= LARGEST_SMALL]
        index = bisect.bisect_left(pool, (size,))
        return pool.pop(index)[2] if index < len(pool) else None

    def _segment(self, size: int) -> Block:
        small = size <= LARGEST_SMALL
        if small:
            length = SMALL_SEGMENT
        elif size < LEAST_OWN_SEGMENT:
            length = SHARED_SEGMENT
        else:
            length = round_up(size, SEGMENT_ROUNDING)
        block = Block(self._next_address, length, small)
        self._next_address += length
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._give(rest)

    def _merged(self, low: Block, high: Block) -> Block:
        low.size += high.size
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        return low

    def _give(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._pools[block.small], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        pool = self._pools[block.small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]
