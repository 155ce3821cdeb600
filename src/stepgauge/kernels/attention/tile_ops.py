"""What the Triton kernels of attention share: which tile a program has, and how rows come in and go
out.

Legend: D head width. Inside kernels q_MD is a tile of M queries, k_ND of N keys.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))

# Counts that no address is made of: a new value of theirs must not compile the kernel again.
# Strides are specialised, because that they are multiples of 16 is what makes wide loads and stores
# possible.
_COUNTS = (
    "num_heads", "all_heads", "all_kv_heads", "num_queries", "num_keys", "num_tiles", "section", "chunk",
    "num_splits", "num_rows", "tile_rows", "step", "other_rows",
)  # fmt: skip


@triton.jit
def _locate(pid, num_tiles, num_heads, section):
    """(tile, head) of a program: sections of heads that fit in L2 together, within one by tile,
    then by head.
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
    """(first row, head, batch, its head, its key head, split, first key, end of keys) of a tile of
    queries.
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
    """(first column, key head, batch, its key head, split, first query, end of queries) of a tile
    of keys.
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
    """Up to there tiles need no mask: every key of theirs exists and is seen by the first row."""
    whole = (last // BLOCK_N) * BLOCK_N
    if IS_CAUSAL:
        whole = tl.minimum(whole, ((row + 1) // BLOCK_N) * BLOCK_N)
    return tl.maximum(whole, first)


@triton.jit
def _seen_by(
    index_X, spans, num_own, num_other,
    OF_KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """First and last key that each query sees, or OF_KEYS the queries that see each key. A row past
    the end sees what the last one sees. `spans`: where each token's sequence begins and ends.
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
    """Where the tiles begin that any row sees, where those begin and end that all rows see whole,
    and where the last one ends.
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
    """Rows row .. row + BLOCK of head (b, h), zero outside of the tensor if MASK. `x`: a descriptor
    or a pointer.
    """
    if USE_TMA:
        tile = x.load([b, h, row, 0]).reshape(BLOCK, BLOCK_D)
    else:
        r = tl.arange(0, BLOCK)
        d = tl.arange(0, BLOCK_D)
        # int64: b, h and row may each step over 2^31 elements; within one tile int32 is enough.
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
    """A number a row. Of fewer numbers than threads each is read twice or four times, at once:
    Triton 3.6 takes a small load for a cheap one and has every thread copy all that it uses, 32
    asynchronous copies of 4 bytes instead of one.
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
