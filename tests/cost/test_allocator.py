"""The model of the caching allocator against rules that torch documents and cases worked out by
hand.
"""

import itertools
import random

from stepgauge.cost.memory.allocator import MIB, CachingAllocator


def test_sizes_are_rounded_and_counted_like_in_torch():
    allocator = CachingAllocator()
    small = allocator.allocate(1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.allocate(513)
    assert allocator.allocated == 512 + 1024
    allocator.free(small)
    assert (allocator.allocated, allocator.reserved) == (1024, 2 * MIB)


def test_a_large_block_keeps_a_rest_of_up_to_1_mib():
    allocator = CachingAllocator()
    # its own segment, rounded up to 12 MiB; 2 MiB - 512 are split off
    allocator.allocate(10 * MIB + 512)
    assert (allocator.allocated, allocator.reserved) == (10 * MIB + 512, 12 * MIB)
    allocator.allocate(11 * MIB)  # 12 MiB; a rest of 1 MiB is too small to be split off
    assert (allocator.allocated, allocator.reserved) == (10 * MIB + 512 + 12 * MIB, 24 * MIB)


def test_the_smallest_free_block_is_used_and_neighbours_merge():
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(4 * MIB) for _ in range(3))  # one segment of 20 MiB
    allocator.free(second)
    assert allocator.allocate(3 * MIB - 512).address == second.address
    allocator.free(first)
    allocator.free(third)  # merges with the rest of the second and with the end of the segment
    assert allocator.allocate(9 * MIB).address == second.address + 3 * MIB - 512
    assert allocator.reserved == 20 * MIB


def test_no_byte_is_lost_or_allocated_twice():
    random.seed(0)
    allocator, live = CachingAllocator(), []
    for _ in range(3000):
        if live and random.random() < 0.5:
            allocator.free(live.pop(random.randrange(len(live))))
        else:
            live.append(allocator.allocate(int(2 ** random.uniform(0, 26))))
        assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
    places = sorted((block.address, block.size) for block in live)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))
    for block in live:
        allocator.free(block)
    segments = [block for pool in allocator._pools.values() for _, _, block in pool]
    assert all(block.before is None and block.after is None for block in segments)
    assert (allocator.allocated, allocator.reserved) == (0, sum(block.size for block in segments))
