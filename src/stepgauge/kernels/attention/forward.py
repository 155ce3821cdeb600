"""The forward of FlashAttention-2 (Dao 2023) in Triton: each program computes one tile of queries.

Legend: H query heads, K key heads, T_q queries, T_k keys, D head width. q_MD is a tile of M
queries, k_ND of N keys; s_MN scores, s_NM scores transposed.
"""

import math

import triton
import triton.language as tl

from .tile_ops import (
    _COUNTS,
    _edges,
    _end_of_whole_tiles,
    _load_rows,
    _query_program,
    _seen_by,
    _store_rows,
)

LN_2 = tl.constexpr(math.log(2.0))
# The initial row maximum where a tile may mask all keys of a row. It is finite, so that
# exp2(-inf - LOWEST) is zero and not NaN.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _forward_loop(
    acc_MD, total_M, max_M, q_MD, k, v, b, h, start, stop, row, first_M, last_M, k_b, k_h, k_t, v_b, v_h, v_t,
    num_keys, scale_log2,
    IS_CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, MASK: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    rows_M = row + tl.arange(0, BLOCK_M)
    cols_N = tl.arange(0, BLOCK_N)
    for col in tl.range(start, stop, BLOCK_N):
        k_ND = _load_rows(
            k, b, h, col, k_b, k_h, k_t, num_keys, HEAD_WIDTH, BLOCK_N, BLOCK_D, USE_TMA, MASK
        )
        s_MN = tl.dot(q_MD, k_ND.T, input_precision=PRECISION)
        if MASK:
            visible = (col + cols_N < num_keys)[None, :]
            if BOUNDED:
                visible = (col + cols_N)[None, :] >= first_M[:, None]
                visible = visible & ((col + cols_N)[None, :] <= last_M[:, None])
            elif IS_CAUSAL:
                visible = visible & (rows_M[:, None] >= (col + cols_N)[None, :])
            s_MN = tl.where(visible, s_MN, float("-inf"))
        # One fused multiply-add per element. The maximum may be taken before scaling, because the
        # scale is positive.
        new_max_M = tl.maximum(max_M, tl.max(s_MN, 1) * scale_log2)
        p_MN = tl.exp2(s_MN * scale_log2 - new_max_M[:, None])
        shrink_M = tl.exp2(max_M - new_max_M)
        total_M = total_M * shrink_M + tl.sum(p_MN, 1)
        acc_MD = acc_MD * shrink_M[:, None]
        v_ND = _load_rows(
            v, b, h, col, v_b, v_h, v_t, num_keys, HEAD_WIDTH, BLOCK_N, BLOCK_D, USE_TMA, MASK
        )
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
        max_M = new_max_M
    return acc_MD, total_M, max_M


@triton.jit(do_not_specialize=_COUNTS)
def forward_kernel(
    # Pointers; if USE_TMA, q, k and v are descriptors, of boxes (1, 1, BLOCK_M or BLOCK_N,
    # BLOCK_D).
    q, k, v, o, lse, spans,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    num_heads, all_heads, num_queries, num_keys, num_tiles, section, chunk, o_split, lse_split, scale_log2,
    IS_CAUSAL: tl.constexpr, HAS_TAIL: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Computes o (normalised by the chunk's own sum) and its log-sum-exp for one tile of queries
    and one chunk of the keys. With a window or packed sequences, which are never split, the program
    loops only over the keys that the tile sees.
    """
    BOUNDED: tl.constexpr = WINDOW > 0 or PACKED
    row, head, b, h, kv_h, split, first, last = _query_program(
        num_tiles, num_heads, all_heads, num_keys, section, chunk, IS_CAUSAL, GROUP, BLOCK_M)  # fmt: skip
    if IS_CAUSAL and SPLIT:  # noqa: SIM102 - a tile that sees no key of the chunk; the combining kernel skips it
        if first >= last:
            return
    q_MD = _load_rows(
        q, b, h, row, q_b, q_h, q_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D, USE_TMA, True
    )
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    max_M = tl.full([BLOCK_M], LOWEST if BOUNDED else float("-inf"), tl.float32)

    first_M, last_M = row, row
    if BOUNDED:
        first_M, last_M = _seen_by(row + tl.arange(0, BLOCK_M), spans, num_queries, num_keys, False, IS_CAUSAL,
                                   WINDOW, PACKED)  # fmt: skip
        begin, first, whole, last = _edges(first_M, last_M, BLOCK_N)
        acc_MD, total_M, max_M = _forward_loop(
            acc_MD, total_M, max_M, q_MD, k, v, b, kv_h, begin, first, row, first_M, last_M, k_b, k_h, k_t,
            v_b, v_h, v_t, num_keys, scale_log2, IS_CAUSAL, BOUNDED, True, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N,
            PRECISION, USE_TMA)  # fmt: skip
    else:
        whole = _end_of_whole_tiles(first, last, row, IS_CAUSAL, BLOCK_N)
    acc_MD, total_M, max_M = _forward_loop(
        acc_MD, total_M, max_M, q_MD, k, v, b, kv_h, first, whole, row, first_M, last_M, k_b, k_h, k_t, v_b, v_h, v_t,
        num_keys, scale_log2, IS_CAUSAL, BOUNDED, False, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        USE_TMA)  # fmt: skip
    if HAS_TAIL or BOUNDED:
        acc_MD, total_M, max_M = _forward_loop(
            acc_MD, total_M, max_M, q_MD, k, v, b, kv_h, whole, last, row, first_M, last_M, k_b, k_h, k_t,
            v_b, v_h, v_t, num_keys, scale_log2, IS_CAUSAL, BOUNDED, True, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N,
            PRECISION, USE_TMA)  # fmt: skip

    o += tl.cast(split, tl.int64) * o_split
    lse += tl.cast(split, tl.int64) * lse_split
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
    rows_M = row + tl.arange(0, BLOCK_M)
    lse_M = (max_M + tl.log2(total_M)) * LN_2
    tl.store(lse + head.to(tl.int64) * num_queries + rows_M, lse_M, mask=rows_M < num_queries)
