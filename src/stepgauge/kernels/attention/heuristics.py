"""Chooses what to launch: tile sizes for each (kernel, architecture, type, head width), and the
number of programs that share a loop.

Pure Python without torch and triton, so that the choices can be tested anywhere. Legend: D head
width.
"""

import contextlib
import heapq
import math
from dataclasses import dataclass, replace

MIN_HEAD_WIDTH, MAX_HEAD_WIDTH = 16, 256
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Fitted to one-head sweeps on an H100 (docs/log/2026-11-21-attention.md): the overhead of a program
# in addition to its inner tiles, the launch and start of a kernel that sums parts, and the rate at
# which parts are written and read.
_PROGRAM_US, _REDUCE_US, _PART_BYTES_PER_US = 1.0, 7.0, 3e6
# A multiprocessor with w resident warps works at a rate proportional to w / (w + _HALF_RATE_WARPS).
_HALF_RATE_WARPS = 4.0
# Tensor-core rate of one multiprocessor, used for tiles whose time was not measured: 400 TFLOP/s
# over the 132 multiprocessors of an H100. float32 has a tenth of it.
_FLOPS_PER_US = 3e6
_TILE_STEPS = 1  # overhead of a tile in addition to its loop, in steps of the loop; a guess
_PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}


@dataclass(frozen=True)
class Tiles:
    """The tile sizes and options of one kernel's launch.

    `programs_per_sm` is the number that registers and shared memory allow, and `tile_us` the
    measured microseconds of one inner tile on a full multiprocessor (0: not measured); both decide
    how a loop is split. `fp32_products` says how float32 products are made if tf32 is not allowed:
    "ieee" on the ordinary units; "tf32x3" as three tf32 products of upper and lower halves;
    "bf16x6" as six bf16 products of upper, middle and lower parts. All three have float32's error.
    `order` says whether dkdv computes dP before the exponentials ("early") or after them ("late",
    fewer registers).
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    use_tma: bool = False
    programs_per_sm: int = 1
    tile_us: float = 0.0
    fp32_products: str = "tf32x3"
    order: str = "late"


def block_width(head_width):
    """Returns the power of two to which a tile pads a head width."""
    return max(MIN_HEAD_WIDTH, 1 << (head_width - 1).bit_length())


def choose_num_splits(
    kernel, tiles, *, num_heads, num_queries, num_keys, head_width, itemsize, num_sms, is_causal
):
    """Returns how many programs share the loop of one tile, so that few heads still fill the chip.
    It is the number with the shortest predicted time.

    The prediction simulates the launch (programs start in the order of the grid, each on the first
    multiprocessor with room) and adds the cost of the parts. Splits are only considered while there
    are few programs, so the memory for parts is bounded by the chip and not by the length.
    """
    own, other = (num_keys, num_queries) if kernel == "dkdv" else (num_queries, num_keys)
    block, loop_block = (
        (tiles.block_k, tiles.block_q) if kernel == "dkdv" else (tiles.block_q, tiles.block_k)
    )
    most = 8 * num_sms * tiles.programs_per_sm // max(1, num_heads * math.ceil(own / block))
    candidates = [s for s in _SPLITS if s <= max(1, min(most, math.ceil(other / loop_block)))]
    if len(candidates) == 1:
        return 1
    shape = {
        "num_heads": num_heads,
        "num_queries": num_queries,
        "num_keys": num_keys,
        "head_width": head_width,
    }
    options = {"itemsize": itemsize, "num_sms": num_sms, "is_causal": is_causal}
    return min(candidates, key=lambda s: predict_us(kernel, tiles, s, **shape, **options))


def predict_us(kernel, tiles, num_splits, *, num_heads, num_queries, num_keys, head_width, itemsize, num_sms,
               is_causal):  # fmt: skip
    """Returns the predicted microseconds of one kernel and of summing its parts, without the cost
    of launching the kernel itself.
    """
    loops = _loop_tiles(kernel, tiles, num_splits, num_queries, num_keys, is_causal)
    tile_us = tiles.tile_us
    if not tile_us:
        flops = _PRODUCTS[kernel] * 2 * tiles.block_q * tiles.block_k * block_width(head_width)
        tile_us = flops / (_FLOPS_PER_US if itemsize < 4 else _FLOPS_PER_US / 10)
    works = [count * tile_us + _PROGRAM_US for count in loops for _ in range(num_heads) if count]
    cost = _makespan(works, num_sms, tiles.programs_per_sm, tiles.num_warps)
    if num_splits > 1:
        rows, outs = (tiles.block_k, 2) if kernel == "dkdv" else (tiles.block_q, 1)
        # Each part is written once and read once, in float32.
        cost += _REDUCE_US + 2 * len(works) * rows * head_width * 4 * outs / _PART_BYTES_PER_US
    return cost


def _loop_tiles(kernel, tiles, num_splits, num_queries, num_keys, is_causal):
    """Returns how many inner tiles each program of one head loops over, in the order of the
    grid.
    """
    over_queries = kernel == "dkdv"
    own, other = (num_keys, num_queries) if over_queries else (num_queries, num_keys)
    block, step = (tiles.block_k, tiles.block_q) if over_queries else (tiles.block_q, tiles.block_k)
    chunk = chunk_length(other, num_splits, max(block, step))
    count = math.ceil(own / block)
    loops = []
    for split in range(math.ceil(other / chunk)):
        for index in range(count):
            first, last = split * chunk, min((split + 1) * chunk, other)
            if is_causal and over_queries:
                first = max(first, index * block // step * step)
            elif is_causal:
                last = min(last, (count - index) * block)  # the last tile first
            loops.append(max(0, math.ceil((last - first) / step)))
    return loops


def _makespan(works, num_sms, per_sm, num_warps):
    """Returns when the last program ends, if each starts in order as soon as a multiprocessor has
    room.

    `works` are in microseconds of a full multiprocessor. A multiprocessor with n programs of w
    warps runs at the rate of n * w warps and shares it evenly among them. Since all programs
    resident on it progress equally, a program ends when the multiprocessor's progress reaches a
    value that is fixed when the program starts. `ends` holds these values.
    """

    def rate(programs):
        warps = programs * num_warps
        return warps / (warps + _HALF_RATE_WARPS)

    share = [0.0] + [n * rate(per_sm) / rate(n) for n in range(1, per_sm + 1)]
    waiting = iter(works)
    ends = [[] for _ in range(num_sms)]
    for _ in range(per_sm):  # every multiprocessor gets its first program before any gets a second
        for sm, work in zip(ends, waiting):  # noqa: B905 - shorter on purpose
            heapq.heappush(sm, work)
    events = [(sm[0] * share[len(sm)], index) for index, sm in enumerate(ends) if sm]
    heapq.heapify(events)
    time = 0.0
    while events:
        time, index = heapq.heappop(events)
        sm = ends[index]
        progress = heapq.heappop(sm)
        work = next(waiting, None)
        if work is not None:
            heapq.heappush(sm, progress + work)
        if sm:
            heapq.heappush(events, (time + (sm[0] - progress) * share[len(sm)], index))
    return time


def schedule_tiles(steps, *, num_heads, section, num_programs):
    """Assigns tiles to `num_programs` persistent programs; each tile goes to the program that is
    free first. Returns the tile numbers of each program.

    `steps` has the number of inner tiles that each tile of a head loops over; the number of a tile
    is head * len(steps) + tile. As in a grid with one program per tile, sections of heads follow
    one another, and within a section the longest tiles come first.
    """
    tiles_of_program = [[] for _ in range(num_programs)]
    free = [(0, program) for program in range(num_programs)]
    longest_first = sorted(range(len(steps)), key=lambda tile: -steps[tile])
    for first in range(0, num_heads, section):
        for tile in longest_first:
            for head in range(first, min(first + section, num_heads)):
                time, program = free[0]
                tiles_of_program[program].append(head * len(steps) + tile)
                heapq.heapreplace(free, (time + steps[tile] + _TILE_STEPS, program))
    return tiles_of_program


def chunk_length(length, num_splits, granule):
    """Returns the rows of one split: a multiple of `granule` such that `num_splits` cover `length`.

    The granule is the larger tile edge, so that a chunk never begins inside a diagonal tile. Every
    row of a program that does not exit at once then sees the first key of its chunk, so that no row
    is completely masked.
    """
    return max(1, math.ceil(length / (num_splits * granule))) * granule


def heads_per_section(*, head_bytes, l2_bytes, num_heads, least=1):
    """Returns how many heads run concurrently: as many as keep the data that their loops read
    within half of the L2 cache.

    Every section, also the last, has at least `least` heads, unless there are fewer in total.
    """
    size = min(num_heads, max(1, least, int(l2_bytes / 2 // max(1, head_bytes))))
    while 0 < num_heads % size < least:
        size += 1
    return size


def min_heads_per_section(num_tiles, num_slots):
    """Returns how many heads a section needs so that its causal tiles, spread over the chip, take
    as long as the longest tile. The lengths of a head's tiles are 1 to num_tiles.

    If the last section has fewer heads, its longest tiles start when little other work is left and
    leave most of the chip idle: 8 heads in sections of 7 and 1 take almost twice as long as 8 heads
    in one section.
    """
    return math.ceil(2 * num_slots / (num_tiles + 1))


# ---- tiles ---------------------------------------------------------------------------------------------------------

_OVERRIDES: dict[str, Tiles] = {}


@contextlib.contextmanager
def override_tiles(**tiles):
    """Uses the given Tiles for the named kernels (as for select_tiles): for tests and for
    tuning.
    """
    before = dict(_OVERRIDES)
    _OVERRIDES.update(tiles)
    try:
        yield
    finally:
        _OVERRIDES.clear()
        _OVERRIDES.update(before)


def overrides():
    """Returns the overridden tiles as a hashable value, which is part of the launch key."""
    return tuple(sorted(_OVERRIDES.items())) if _OVERRIDES else ()


def select_tiles(
    kernel, *, arch, itemsize, head_width, is_causal=True, tma=False, is_bounded=False
):
    """Returns the Tiles of `kernel` on compute capability `arch` (90 is sm_90, 0 the interpreter).

    The kernels are forward, dq and dkdv, and in bf16x3.py dq_bf16x3 and dkdv_bf16x3. `tma` means
    that the copy engine can read the tensors, `is_bounded` that there is a window or packed
    sequences.
    """
    if kernel in _OVERRIDES:
        tiles = _OVERRIDES[kernel]
        return tiles if tma or not tiles.use_tma else replace(tiles, use_tma=False)
    if arch == 0:
        return Tiles(32, 32, 4, 1)
    if kernel in _SM90_BF16X3:
        return _SM90_BF16X3[kernel][head_width]
    if itemsize == 4:
        table = _SM90_FP32 if arch == 90 else _FP32
    else:
        table = _SM90_TMA if arch == 90 and tma else _BY_POINTER
    width = block_width(head_width)
    if is_bounded and table is _BY_POINTER and kernel == "dkdv":
        width = max(width, 128)  # with two masked loops, the larger tiles spill 880 words on sm_80
    if table is _SM90_TMA and not is_causal and (kernel, width) in _SM90_FULL:
        return _SM90_FULL[kernel, width]
    return table[kernel][width]


def _by_width(d16, d32, d64, d128, d256):
    return {16: d16, 32: d32, 64: d64, 128: d128, 256: d256}


def _bf16x6(block_q, block_k, num_warps, num_stages, programs_per_sm=1, tile_us=0.0):
    return Tiles(block_q, block_k, num_warps, num_stages, False, programs_per_sm, tile_us, "bf16x6")


# Each line has head widths 16, 32, 64, 128, 256. Every entry was compiled ahead of time for its
# architectures: it fits in shared memory and spills no registers unless a comment says so.
# `_BY_POINTER` fits in the 99 KiB of the smallest of these chips. sm_90 uses it too if the copy
# engine cannot read the tensors or is not worth its set-up.

_BY_POINTER = {
    "forward": _by_width(
        Tiles(128, 64, 4, 3, programs_per_sm=2), Tiles(128, 64, 4, 3, programs_per_sm=2),
        Tiles(128, 64, 8, 3, programs_per_sm=2), Tiles(64, 64, 4, 2, programs_per_sm=2), Tiles(64, 32, 8, 1),
    ),
    "dq": _by_width(
        Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2, programs_per_sm=2),
        Tiles(32, 32, 4, 1, programs_per_sm=2),
    ),
    "dkdv": _by_width(
        Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 2), Tiles(32, 64, 4, 2, programs_per_sm=2),
        Tiles(32, 32, 4, 1, programs_per_sm=2),  # 33 spilled words on sm_80
    ),
}  # fmt: skip

# Widths 64 and 128 are the fastest of 7 to 14 candidates measured on an H100 on 2026-11-21 (16384
# tokens as 2 x 8192, causal); 16, 32 and 256 are extrapolated. `tile_us` is that measurement minus
# the programs' overhead, divided by the number of inner tiles. At 16 and 32 it is fitted so that
# the model above predicts the measured time of one head of length 32768 on an H200 (forward 0.276
# and 0.294 ms, backward 0.616 and 0.662 ms, assuming that dq takes the same share of it as at 64).
_SM90_TMA = {
    "forward": _by_width(
        Tiles(64, 64, 4, 3, True, 4, 0.256), Tiles(64, 64, 4, 3, True, 4, 0.272), Tiles(64, 64, 4, 3, True, 3, 0.304),
        Tiles(64, 64, 4, 3, True, 2, 0.536), Tiles(128, 32, 8, 2, True),
    ),
    "dq": _by_width(
        Tiles(64, 128, 4, 3, True, 2, 0.450), Tiles(64, 128, 4, 3, True, 2, 0.484),
        Tiles(64, 128, 4, 3, True, 2, 0.603), Tiles(128, 64, 8, 3, True, 1, 1.230), Tiles(64, 32, 8, 2, True),
    ),
    "dkdv": _by_width(
        Tiles(128, 64, 4, 2, True, 2, 0.742), Tiles(128, 64, 4, 2, True, 2, 0.798),
        Tiles(64, 64, 4, 3, True, 2, 0.497, order="early"),
        Tiles(64, 64, 4, 2, True, 2, 0.904), Tiles(32, 64, 8, 2, True),
    ),
}  # fmt: skip

# Kernels for which another tile is the fastest without a causal mask: by 4 % (forward) and 19 %
# (dq). For dkdv at 64, this is the fastest tile that was measured; the causal one was not measured
# here.
_SM90_FULL = {
    ("forward", 64): Tiles(128, 64, 8, 3, False, 2, 0.583),
    ("forward", 128): Tiles(128, 64, 8, 3, False, 1, 1.041),
    ("dq", 64): Tiles(128, 64, 8, 3, False, 1, 0.628),
    ("dkdv", 64): Tiles(128, 64, 4, 2, True, 2, 1.094),
}

# float32 as three tf32 products keeps two halves of every operand, so tiles are small. Widths 128
# and 256 spill on sm_80, where the tile cannot shrink further: they are correct but slow.
_FP32 = {
    "forward": _by_width(
        Tiles(64, 64, 4, 2, programs_per_sm=2), Tiles(64, 32, 4, 2, programs_per_sm=2), Tiles(64, 32, 8, 1),
        Tiles(32, 16, 4, 1, programs_per_sm=2), Tiles(16, 16, 4, 1),
    ),
    "dq": _by_width(
        Tiles(64, 32, 4, 2, programs_per_sm=2), Tiles(64, 32, 4, 2, programs_per_sm=2),
        Tiles(32, 32, 4, 1, programs_per_sm=2), Tiles(16, 16, 4, 1, programs_per_sm=2), Tiles(16, 16, 4, 1),
    ),
    "dkdv": _by_width(
        Tiles(32, 64, 4, 2, programs_per_sm=2), Tiles(32, 64, 4, 2, programs_per_sm=2),
        Tiles(32, 32, 4, 1, programs_per_sm=2), Tiles(16, 16, 4, 1, programs_per_sm=2), Tiles(16, 16, 4, 1),
    ),
}  # fmt: skip

# float32 as six bf16 products, whose parts fit in larger tiles than halves in tf32. These are the
# fastest of 8 candidates measured on an H200 on 2026-11-21 (8 heads, T 4096, no mask); 16 and 32
# are by analogy and compile without spills. At 64 and 128 most candidates spill and are the fastest
# nonetheless. `tile_us` is fitted so that the model above predicts the measurement. dq and dkdv
# were measured in a whole backward in which one of them changed; the other's share was taken from
# the tiles that these replace.
_SM90_FP32 = {
    "forward": _by_width(
        _bf16x6(128, 64, 8, 1, 2), _bf16x6(128, 64, 8, 1),
        _bf16x6(128, 64, 8, 1, 1, 4.676), _bf16x6(64, 64, 4, 1, 2, 4.202),
        Tiles(16, 16, 4, 1),
    ),
    "dq": _by_width(
        _bf16x6(64, 64, 4, 1, 2), _bf16x6(64, 64, 4, 1, 2),
        _bf16x6(64, 64, 4, 1, 2, 3.191), _bf16x6(128, 32, 8, 1, 1, 7.177),
        Tiles(16, 16, 4, 1),
    ),
    "dkdv": _by_width(
        _bf16x6(64, 128, 8, 1), _bf16x6(64, 128, 8, 1),
        _bf16x6(64, 128, 8, 1, 1, 7.898), _bf16x6(16, 64, 4, 1, 2, 3.806),
        Tiles(16, 16, 4, 1),
    ),
}  # fmt: skip


# For operands split into bf16 parts (bf16x3.py), by head width. These compile without spills; other
# tiles were not timed.
_SM90_BF16X3 = {
    "dq_bf16x3": {64: Tiles(128, 64, 8, 2, True), 128: Tiles(64, 32, 4, 2, True)},
    "dkdv_bf16x3": {64: Tiles(32, 64, 4, 2, True, 2), 128: Tiles(32, 64, 4, 2, True)},
}
