"""The backward of FlashAttention-2 (Dao 2023) in Triton: one kernel computes dq per tile of
queries, one computes dk and dv per tile of keys.

Legend: H query heads, K key heads, T_q queries, T_k keys, D head width. q_MD is a tile of M
queries, k_ND of N keys; s_MN scores, s_NM scores transposed.
"""

import triton
import triton.language as tl

from .tile_ops import (
    _COUNTS,
    LOG2_E,
    _edges,
    _end_of_whole_tiles,
    _key_program,
    _load_numbers,
    _load_rows,
    _query_program,
    _seen_by,
    _store_rows,
)


@triton.jit
def _dq_loop(
    dq_MD, q_MD, do_MD, lse2_M, delta_M, k, v, b, h, start, stop, row, first_M, last_M, k_b, k_h, k_t, v_b, v_h, v_t,
    num_keys, scale_log2,
    IS_CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, MASK: tl.constexpr, HEAD_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    rows_M = row + tl.arange(0, BLOCK_M)
    cols_N = tl.arange(0, BLOCK_N)
    for col in tl.range(start, stop, BLOCK_N):
        k_ND = _load_rows(
            k, b, h, col, k_b, k_h, k_t, num_keys, HEAD_WIDTH, BLOCK_N, BLOCK_D, USE_TMA, MASK
        )
        v_ND = _load_rows(
            v, b, h, col, v_b, v_h, v_t, num_keys, HEAD_WIDTH, BLOCK_N, BLOCK_D, USE_TMA, MASK
        )
        s_MN = tl.dot(q_MD, k_ND.T, input_precision=PRECISION)
        dp_MN = tl.dot(do_MD, v_ND.T, input_precision=PRECISION)
        p_MN = tl.exp2(s_MN * scale_log2 - lse2_M[:, None])
        if MASK:
            visible = (col + cols_N < num_keys)[None, :]
            if BOUNDED:
                visible = (col + cols_N)[None, :] >= first_M[:, None]
                visible = visible & ((col + cols_N)[None, :] <= last_M[:, None])
            elif IS_CAUSAL:
                visible = visible & (rows_M[:, None] >= (col + cols_N)[None, :])
            p_MN = tl.where(visible, p_MN, 0.0)
        ds_MN = p_MN * (dp_MN - delta_M[:, None])
        dq_MD = tl.dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD, input_precision=PRECISION)
    return dq_MD


@triton.jit(do_not_specialize=_COUNTS)
def dq_kernel(
    q, k, v, do, o, lse, delta, dq, spans,  # q, k, v and do are descriptors if USE_TMA
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, o_b, o_h, o_t, dq_b, dq_h, dq_t,
    num_heads, all_heads, num_queries, num_keys, num_tiles, section, chunk, dq_split, scale_log2, scale,
    IS_CAUSAL: tl.constexpr, HAS_TAIL: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Computes dq = scale (P * (do v^T - delta)) k for one tile of queries and one chunk of the
    keys, and writes delta.

    delta is computed here because this kernel runs first and loads do anyway, which saves a launch
    and a read of do.
    """
    BOUNDED: tl.constexpr = WINDOW > 0 or PACKED
    row, head, b, h, kv_h, split, first, last = _query_program(
        num_tiles, num_heads, all_heads, num_keys, section, chunk, IS_CAUSAL, GROUP, BLOCK_M)  # fmt: skip
    if IS_CAUSAL and SPLIT:  # noqa: SIM102 - a tile that sees no key of the chunk; sum_parts_kernel skips it
        if first >= last:
            return
    rows_M = row + tl.arange(0, BLOCK_M)
    q_MD = _load_rows(
        q, b, h, row, q_b, q_h, q_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D, USE_TMA, True
    )
    do_MD = _load_rows(
        do, b, h, row, do_b, do_h, do_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D, USE_TMA, True
    )
    o_MD = _load_rows(
        o, b, h, row, o_b, o_h, o_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D, False, True
    )
    delta_M = tl.sum(o_MD.to(tl.float32) * do_MD.to(tl.float32), 1)
    own = head.to(tl.int64) * num_queries
    if SPLIT:
        if split == 0:  # the only split that every tile sees
            tl.store(delta + own + rows_M, delta_M, mask=rows_M < num_queries)
    else:
        tl.store(delta + own + rows_M, delta_M, mask=rows_M < num_queries)
    lse2_M = tl.load(lse + own + rows_M, mask=rows_M < num_queries, other=float("inf")) * LOG2_E

    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_M, last_M = row, row
    if BOUNDED:
        first_M, last_M = _seen_by(
            rows_M, spans, num_queries, num_keys, False, IS_CAUSAL, WINDOW, PACKED
        )
        begin, first, whole, last = _edges(first_M, last_M, BLOCK_N)
        dq_MD = _dq_loop(
            dq_MD, q_MD, do_MD, lse2_M, delta_M, k, v, b, kv_h, begin, first, row, first_M, last_M, k_b, k_h, k_t,
            v_b, v_h, v_t, num_keys, scale_log2, IS_CAUSAL, BOUNDED, True, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N,
            PRECISION, USE_TMA)  # fmt: skip
    else:
        whole = _end_of_whole_tiles(first, last, row, IS_CAUSAL, BLOCK_N)
    dq_MD = _dq_loop(
        dq_MD, q_MD, do_MD, lse2_M, delta_M, k, v, b, kv_h, first, whole, row, first_M, last_M, k_b, k_h, k_t,
        v_b, v_h, v_t, num_keys, scale_log2, IS_CAUSAL, BOUNDED, False, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N,
        PRECISION, USE_TMA)  # fmt: skip
    if HAS_TAIL or BOUNDED:
        dq_MD = _dq_loop(
            dq_MD, q_MD, do_MD, lse2_M, delta_M, k, v, b, kv_h, whole, last, row, first_M, last_M, k_b, k_h, k_t,
            v_b, v_h, v_t, num_keys, scale_log2, IS_CAUSAL, BOUNDED, True, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N,
            PRECISION, USE_TMA)  # fmt: skip
    dq += tl.cast(split, tl.int64) * dq_split
    _store_rows(
        dq, dq_MD * scale, b, h, row, dq_b, dq_h, dq_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D
    )


@triton.jit
def _dkdv_loop(
    dk_ND, dv_ND, k_ND, v_ND, q, do, lse, delta, b, kv_h, start, stop, col, first_N, last_N,
    q_b, q_h, q_t, do_b, do_h, do_t, num_heads, num_queries, scale_log2,
    BOUNDED: tl.constexpr, MASK: tl.constexpr, GROUP: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr, ORDER: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of rows start .. stop of every query head that shares the key head.
    One loop covers heads and rows, so that loads are pipelined across heads.
    """
    cols_N = col + tl.arange(0, BLOCK_N)
    local_M = tl.arange(0, BLOCK_M)
    tiles = tl.cdiv(tl.maximum(stop - start, 0), BLOCK_M)
    for index in tl.range(0, tiles * GROUP, 1):
        if GROUP == 1:
            h = kv_h
            row = start + index * BLOCK_M
        else:
            h = kv_h * GROUP + index // tiles
            row = start + (index % tiles) * BLOCK_M
        own = tl.cast(b * num_heads + h, tl.int64) * num_queries
        rows_M = row + local_M
        q_MD = _load_rows(
            q, b, h, row, q_b, q_h, q_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D, USE_TMA, True
        )
        do_MD = _load_rows(
            do, b, h, row, do_b, do_h, do_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D, USE_TMA, True
        )  # fmt: skip
        # A query past the end gets an infinite log-sum-exp, so that its probabilities are zero
        # without another mask.
        lse2_M = (
            _load_numbers(lse + own + rows_M, rows_M < num_queries, float("inf"), BLOCK_M, THREADS)
            * LOG2_E
        )
        if ORDER == "early":
            delta_M = _load_numbers(
                delta + own + rows_M, rows_M < num_queries, 0.0, BLOCK_M, THREADS
            )
        # Scores are transposed, so that P^T and dS^T are in the registers that the next product
        # reads.
        s_NM = tl.dot(k_ND, q_MD.T, input_precision=PRECISION)
        if ORDER == "early":
            dp_NM = tl.dot(v_ND, do_MD.T, input_precision=PRECISION)
        p_NM = tl.exp2(s_NM * scale_log2 - lse2_M[None, :])
        if MASK:
            visible = rows_M[None, :] >= cols_N[:, None]
            if BOUNDED:
                visible = rows_M[None, :] >= first_N[:, None]
                visible = visible & (rows_M[None, :] <= last_N[:, None])
            p_NM = tl.where(visible, p_NM, 0.0)
        dv_ND = tl.dot(p_NM.to(do_MD.dtype), do_MD, dv_ND, input_precision=PRECISION)
        if ORDER == "late":
            # dP and delta come only now, because they do not fit in registers next to the scores.
            dp_NM = tl.dot(v_ND, do_MD.T, input_precision=PRECISION)
            delta_M = _load_numbers(
                delta + own + rows_M, rows_M < num_queries, 0.0, BLOCK_M, THREADS
            )
        ds_NM = (p_NM * (dp_NM - delta_M[None, :])).to(q_MD.dtype)
        dk_ND = tl.dot(ds_NM, q_MD, dk_ND, input_precision=PRECISION)
    return dk_ND, dv_ND


@triton.jit(do_not_specialize=_COUNTS)
def dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, spans,  # q, k, v and do are descriptors if USE_TMA
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    num_heads, all_kv_heads, num_queries, num_keys, num_tiles, section, chunk, dk_split, dv_split, scale_log2, scale,
    IS_CAUSAL: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr, ORDER: tl.constexpr, THREADS: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Computes dv = P^T do and dk = scale (P * (do v^T - delta))^T q for one tile of keys and one
    chunk of the queries.
    """
    BOUNDED: tl.constexpr = WINDOW > 0 or PACKED
    col, _, b, kv_h, split, first, last = _key_program(
        num_tiles, num_heads, all_kv_heads, num_queries, section, chunk, IS_CAUSAL, GROUP, BLOCK_M, BLOCK_N
    )  # fmt: skip
    if IS_CAUSAL and SPLIT:  # noqa: SIM102 - split 0 is always written: with zeros if no query sees the tile
        if first >= last and split != 0:
            return
    k_ND = _load_rows(
        k, b, kv_h, col, k_b, k_h, k_t, num_keys, HEAD_WIDTH, BLOCK_N, BLOCK_D, USE_TMA, True
    )
    v_ND = _load_rows(
        v, b, kv_h, col, v_b, v_h, v_t, num_keys, HEAD_WIDTH, BLOCK_N, BLOCK_D, USE_TMA, True
    )
    dk_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    whole = first
    first_N, last_N = col, col
    if BOUNDED:
        first_N, last_N = _seen_by(col + tl.arange(0, BLOCK_N), spans, num_keys, num_queries, True, IS_CAUSAL,
                                   WINDOW, PACKED)  # fmt: skip
        first, whole, last, end = _edges(first_N, last_N, BLOCK_M)
        dk_ND, dv_ND = _dkdv_loop(
            dk_ND, dv_ND, k_ND, v_ND, q, do, lse, delta, b, kv_h, last, end, col, first_N, last_N,
            q_b, q_h, q_t, do_b, do_h, do_t, num_heads, num_queries, scale_log2,
            BOUNDED, True, GROUP, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, USE_TMA, ORDER,
            THREADS)  # fmt: skip
    elif IS_CAUSAL:  # from `whole` on, all queries see the last key of this tile
        whole = tl.minimum(tl.cdiv(col + BLOCK_N - 1, BLOCK_M) * BLOCK_M, tl.maximum(first, last))
        whole = tl.maximum(whole, first)
    if IS_CAUSAL or BOUNDED:
        dk_ND, dv_ND = _dkdv_loop(
            dk_ND, dv_ND, k_ND, v_ND, q, do, lse, delta, b, kv_h, first, whole, col, first_N, last_N,
            q_b, q_h, q_t, do_b, do_h, do_t, num_heads, num_queries, scale_log2,
            BOUNDED, True, GROUP, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, USE_TMA, ORDER,
            THREADS)  # fmt: skip
    dk_ND, dv_ND = _dkdv_loop(
        dk_ND, dv_ND, k_ND, v_ND, q, do, lse, delta, b, kv_h, whole, last, col, first_N, last_N,
        q_b, q_h, q_t, do_b, do_h, do_t, num_heads, num_queries, scale_log2,
        BOUNDED, False, GROUP, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, USE_TMA, ORDER,
        THREADS)  # fmt: skip
    dk += tl.cast(split, tl.int64) * dk_split
    dv += tl.cast(split, tl.int64) * dv_split
    _store_rows(
        dk, dk_ND * scale, b, kv_h, col, dk_b, dk_h, dk_t, num_keys, HEAD_WIDTH, BLOCK_N, BLOCK_D
    )
    _store_rows(dv, dv_ND, b, kv_h, col, dv_b, dv_h, dv_t, num_keys, HEAD_WIDTH, BLOCK_N, BLOCK_D)
