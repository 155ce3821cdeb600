"""Functions that attention's Triton kernels share: which tile a program computes, and loading and
storing rows.

Legend: D head width. Inside kernels q_MD is a tile of M queries, k_ND of N keys.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))

# Counts that no address depends on: a new value must not compile the kernel again. Strides are
# specialised, because wide loads and stores require that strides are known to be multiples of 16.
_COUNTS = (
    "num_heads", "all_heads", "all_kv_heads", "num_queries", "num_keys", "num_tiles", "section", "chunk",
    "num_splits", "num_rows", "tile_rows", "step", "other_rows",
)  # fmt: skip


@triton.jit
def _locate(pid, num_tiles, num_heads, section):
    """Returns the (tile, head) of a program. Programs are ordered by section of heads (which fit in
    L2 together), then by tile, then by head.
    """
    first = (pid // (num_tiles * section)) * section
    rest = pid % (num_tiles * section)
    width = tl.minimum(section, num_heads - first)
    return rest // width, first + rest % width


@triton.jit
def _query_program(
    num_tiles, num_heads, all_heads, num_keys, section, chunk,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Returns, for the program's tile of queries, (first row, head over all batches, batch, head in
    the batch, key head, split, first key, end of keys).
    """
    tile, head = _locate(tl.program_id(0), num_tiles, all_heads, section)
    split = tl.program_id(1)
    if IS_CAUSAL:  # the last tile sees the most keys: start it first
        tile = num_tiles - 1 - tile
    row = tile * BLOCK_M
    first = split * chunk
    last = tl.minimum(first + chunk, num_keys)
    if IS_CAUSAL:
        last = tl.minimum(last, row + BLOCK_M)
    h = head % num_heads
    return row, head, head // num_heads, h, h // GROUP, split, first, last


@triton.jit
def _key_program(
    num_tiles, num_heads, all_kv_heads, num_queries, section, chunk,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns, for the program's tile of keys, (first column, key head over all batches, batch, key
    head in the batch, split, first query, end of queries).
    """
    tile, head = _locate(tl.program_id(0), num_tiles, all_kv_heads, section)
    split = tl.program_id(1)
    col = tile * BLOCK_N
    first = split * chunk
    last = tl.minimum(first + chunk, num_queries)
    if IS_CAUSAL:
        first = tl.maximum(first, (col // BLOCK_M) * BLOCK_M)
    num_kv_heads = num_heads // GROUP
    return col, head, head // num_kv_heads, head % num_kv_heads, split, first, last


@triton.jit
def _end_of_whole_tiles(first, last, row, IS_CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the key up to which tiles need no mask, because the first row sees all their keys."""
    whole = (last // BLOCK_N) * BLOCK_N
    if IS_CAUSAL:
        whole = tl.minimum(whole, ((row + 1) // BLOCK_N) * BLOCK_N)
    return tl.maximum(whole, first)


@triton.jit
def _seen_by(
    index_X, spans, num_own, num_other,
    OF_KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Returns the first and last key that each query sees, or, if OF_KEYS, the first and last query
    that sees each key. A row past the end gets the last row's values. `spans` holds where each
    token's sequence begins and ends.
    """
    index_X = tl.minimum(index_X, num_own - 1)
    first_X = tl.zeros_like(index_X)
    last_X = first_X + (num_other - 1)
    if WINDOW > 0:
        first_X = tl.maximum(first_X, index_X - (WINDOW - 1))
        last_X = tl.minimum(last_X, index_X + (WINDOW - 1))
    if IS_CAUSAL:
        if OF_KEYS:
            first_X = tl.maximum(first_X, index_X)
        else:
            last_X = tl.minimum(last_X, index_X)
    if PACKED:
        first_X = tl.maximum(first_X, tl.load(spans + index_X))
        last_X = tl.minimum(last_X, tl.load(spans + num_own + index_X) - 1)
    return first_X, last_X


@triton.jit
def _edges(first_X, last_X, BLOCK: tl.constexpr):
    """Returns (begin, begin of whole tiles, end of whole tiles, end). The tiles from begin to end
    are seen by some row; whole tiles are seen completely by all rows and need no mask.
    """
    begin = tl.min(first_X, 0) // BLOCK * BLOCK
    end = tl.max(last_X, 0) + 1
    whole = tl.cdiv(tl.max(first_X, 0), BLOCK) * BLOCK
    stop = (tl.min(last_X, 0) + 1) // BLOCK * BLOCK
    has_whole = whole < stop
    return begin, tl.where(has_whole, whole, begin), tl.where(has_whole, stop, begin), end


@triton.jit
def _load_rows(
    x, b, h, row, stride_b, stride_h, stride_t, num_rows,
    HEAD_WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Loads rows row .. row + BLOCK of head (b, h), with zeros outside the tensor if MASK. `x` is a
    descriptor if USE_TMA, otherwise a pointer.
    """
    if USE_TMA:
        tile = x.load([b, h, row, 0]).reshape(BLOCK, BLOCK_D)
    else:
        r = tl.arange(0, BLOCK)
        d = tl.arange(0, BLOCK_D)
        # int64, because b, h and row may each step over 2^31 elements. Within a tile int32
        # suffices.
        base = (
            x
            + tl.cast(b, tl.int64) * stride_b
            + tl.cast(h, tl.int64) * stride_h
            + tl.cast(row, tl.int64) * stride_t
        )
        pointers = base + r[:, None] * stride_t + d[None, :]
        if MASK and HEAD_WIDTH == BLOCK_D:
            tile = tl.load(pointers, mask=(row + r < num_rows)[:, None], other=0.0)
        elif MASK:
            tile = tl.load(
                pointers, mask=(row + r < num_rows)[:, None] & (d < HEAD_WIDTH)[None, :], other=0.0
            )
        elif HEAD_WIDTH == BLOCK_D:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(d < HEAD_WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _store_rows(
    out, value, b, h, row, stride_b, stride_h, stride_t, num_rows,
    HEAD_WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    base = (
        out
        + tl.cast(b, tl.int64) * stride_b
        + tl.cast(h, tl.int64) * stride_h
        + tl.cast(row, tl.int64) * stride_t
    )
    mask = (row + r < num_rows)[:, None] & (d < HEAD_WIDTH)[None, :]
    tl.store(base + r[:, None] * stride_t + d[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_numbers(pointers, mask, other, COUNT: tl.constexpr, THREADS: tl.constexpr):
    """Loads one number per row. If there are fewer numbers than threads, each is read two or four
    times in one load. Otherwise Triton 3.6 considers the load small and cheap, and lets every
    thread copy all numbers that it uses: 32 asynchronous copies of 4 bytes instead of one.
    """
    if COUNT * 2 > THREADS:
        values = tl.load(pointers, mask=mask, other=other)
    elif COUNT * 4 > THREADS:
        twice = tl.load(
            pointers[:, None] + tl.zeros([1, 2], tl.int32), mask=mask[:, None], other=other
        )
        values, _ = tl.split(twice)
    else:
        often = tl.load(
            pointers[:, None] + tl.zeros([1, 4], tl.int32), mask=mask[:, None], other=other
        )
        twice, _ = tl.split(often.reshape(COUNT, 2, 2))
        values, _ = tl.split(twice)
    return values
