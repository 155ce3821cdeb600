"""Kernels that combine the parts of a loop that was split over programs to fill the chip with few
heads.

Flash-Decoding splits the keys of a forward; here backward's loops are split too.

Legend: H query heads, K key heads, T_q queries, T_k keys, D head width. q_MD is a tile of M
queries, k_ND of N keys; s_MN scores, s_NM scores transposed.
"""

import triton
import triton.language as tl

from .tile_ops import _COUNTS, _store_rows


@triton.jit(do_not_specialize=_COUNTS)
def combine_kernel(
    o_parts, lse_parts, o, lse,
    o_b, o_h, o_t, num_heads, num_queries, num_splits, chunk, o_split, lse_split,
    IS_CAUSAL: tl.constexpr, HEAD_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Computes o = sum_s exp(lse_s - lse) o_s with lse = log sum_s exp(lse_s) over the splits that
    the tile's rows see.
    """
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M
    if IS_CAUSAL:
        # A split wrote this tile if its first key is not after the tile's last row. Tiles here
        # divide the forward's tiles, so a split that one row needs was written for all rows of the
        # tile.
        num_splits = tl.minimum(num_splits, (row + BLOCK_M - 1) // chunk + 1)
    rows_M = row + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    exists_M = rows_M < num_queries
    mask = exists_M[:, None] & (d < HEAD_WIDTH)[None, :]
    lse_parts += head.to(tl.int64) * num_queries
    o_parts += (head.to(tl.int64) * num_queries + row) * HEAD_WIDTH
    local = (rows_M - row)[:, None] * HEAD_WIDTH + d[None, :]
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for split in range(num_splits):
        part_M = tl.load(
            lse_parts + tl.cast(split, tl.int64) * lse_split + rows_M, mask=exists_M, other=0.0
        )
        new_max_M = tl.maximum(max_M, part_M)
        shrink_M = tl.exp(max_M - new_max_M)
        weight_M = tl.exp(part_M - new_max_M)
        o_MD = tl.load(o_parts + tl.cast(split, tl.int64) * o_split + local, mask=mask, other=0.0)
        acc_MD = acc_MD * shrink_M[:, None] + o_MD * weight_M[:, None]
        total_M = total_M * shrink_M + weight_M
        max_M = new_max_M
    b = head // num_heads
    h = head % num_heads
    _store_rows(
        o,
        acc_MD / total_M[:, None],
        b,
        h,
        row,
        o_b,
        o_h,
        o_t,
        num_queries,
        HEAD_WIDTH,
        BLOCK_M,
        BLOCK_D,
    )
    tl.store(lse + head.to(tl.int64) * num_queries + rows_M, max_M + tl.log(total_M), mask=exists_M)


@triton.jit(do_not_specialize=_COUNTS)
def sum_parts_kernel(
    parts, first_out, second_out,
    a_b, a_h, a_t, b_b, b_h, b_t, num_heads, num_rows, num_splits, chunk, out_parts, part_split, tile_rows, step,
    other_rows,
    FROM_FIRST: tl.constexpr, TO_LAST: tl.constexpr, HEAD_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the splits that were written into one or two outputs, always in the same order, so that
    results are bitwise reproducible.

    FROM_FIRST (causal dq): rows see the chunks up to their own. TO_LAST (causal dk, dv): keys are
    seen by their own and later chunks; if no query sees them, split 0 holds zeros. Both repeat the
    index arithmetic of the kernel that wrote the parts.
    """
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK
    which = tl.program_id(2)
    begin = 0
    if FROM_FIRST:
        num_splits = tl.minimum(num_splits, (row + BLOCK - 1) // chunk + 1)
    if TO_LAST:
        tile_row = (row // tile_rows) * tile_rows
        begin = tile_row // chunk
        unseen = (tile_row // step) * step >= other_rows
        begin = tl.where(unseen, 0, begin)
        num_splits = tl.where(unseen, 1, num_splits)
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    mask = (row + r < num_rows)[:, None] & (d < HEAD_WIDTH)[None, :]
    parts += which.to(tl.int64) * out_parts + (head.to(tl.int64) * num_rows + row) * HEAD_WIDTH
    local = r[:, None] * HEAD_WIDTH + d[None, :]
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for split in range(begin, num_splits):
        acc += tl.load(parts + tl.cast(split, tl.int64) * part_split + local, mask=mask, other=0.0)
    b = head // num_heads
    h = head % num_heads
    if which == 0:
        _store_rows(first_out, acc, b, h, row, a_b, a_h, a_t, num_rows, HEAD_WIDTH, BLOCK, BLOCK_D)
    else:
        _store_rows(second_out, acc, b, h, row, b_b, b_h, b_t, num_rows, HEAD_WIDTH, BLOCK, BLOCK_D)
