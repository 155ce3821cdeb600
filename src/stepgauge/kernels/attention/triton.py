"""FlashAttention-2 in Triton: the forward, the two backward kernels, and what adds parts when a
loop is split.

Follows FlashAttention-2 (Dao 2023); splitting the keys is Flash-Decoding's idea, here for training
as well. The derivation, the floors and what was tried are in docs/kernels/attention.md.

Legend: B batch, H query heads, K key heads (H = K * group), T_q queries, T_k keys, D head width, S
splits. Inside kernels q_MD is a tile of M queries, k_ND of N keys; s_MN scores, s_NM scores
transposed.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import bf16x3, extension, heuristics
from .launching import Launch, View, boxes_of, case_of, on_device, rows_last, stream_of
from .tile_ops import (
    _COUNTS,
    LOG2_E,
    _end_of_whole_tiles,
    _key_program,
    _load_numbers,
    _load_rows,
    _query_program,
    _store_rows,
)

try:
    from . import hopper, hopper_backward
except ImportError:  # pragma: no cover - a Triton without Gluon, or with another
    hopper = hopper_backward = None

LN_2 = tl.constexpr(math.log(2.0))

# ---- forward -------------------------------------------------------------------------------------------------------


@triton.jit
def _forward_loop(
    acc_MD, total_M, max_M, q_MD, k, v, b, h, start, stop, row, k_b, k_h, k_t, v_b, v_h, v_t, num_keys, scale_log2,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, HEAD_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
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
            if IS_CAUSAL:
                visible = visible & (rows_M[:, None] >= (col + cols_N)[None, :])
            s_MN = tl.where(visible, s_MN, float("-inf"))
        # One fused multiply-add an element: the scale is positive, so the maximum may be taken
        # before it.
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
    # pointers; k and v are descriptors of boxes (1, 1, BLOCK_N, BLOCK_D) if USE_TMA, q likewise
    q, k, v, o, lse,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    num_heads, all_heads, num_queries, num_keys, num_tiles, section, chunk, o_split, lse_split, scale_log2,
    IS_CAUSAL: tl.constexpr, HAS_TAIL: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
):  # fmt: skip
    """One tile of queries against one chunk of the keys: o (normalised by the chunk's own sum) and
    its log-sum-exp.
    """
    row, head, b, h, kv_h, split, first, last = _query_program(
        num_tiles, num_heads, all_heads, num_keys, section, chunk, IS_CAUSAL, GROUP, BLOCK_M)  # fmt: skip
    if IS_CAUSAL and SPLIT:  # noqa: SIM102 - this tile sees nothing of the chunk, and the sum over parts knows
        if first >= last:
            return
    q_MD = _load_rows(
        q, b, h, row, q_b, q_h, q_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D, USE_TMA, True
    )
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)

    whole = _end_of_whole_tiles(first, last, row, IS_CAUSAL, BLOCK_N)
    acc_MD, total_M, max_M = _forward_loop(
        acc_MD, total_M, max_M, q_MD, k, v, b, kv_h, first, whole, row, k_b, k_h, k_t, v_b, v_h, v_t, num_keys,
        scale_log2, IS_CAUSAL, False, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, USE_TMA)  # fmt: skip
    if HAS_TAIL:
        acc_MD, total_M, max_M = _forward_loop(
            acc_MD, total_M, max_M, q_MD, k, v, b, kv_h, whole, last, row, k_b, k_h, k_t, v_b, v_h, v_t, num_keys,
            scale_log2, IS_CAUSAL, True, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, USE_TMA)  # fmt: skip

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


@triton.jit(do_not_specialize=_COUNTS)
def combine_kernel(
    o_parts, lse_parts, o, lse,
    o_b, o_h, o_t, num_heads, num_queries, num_splits, chunk, o_split, lse_split,
    IS_CAUSAL: tl.constexpr, HEAD_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """o = sum_s exp(lse_s - lse) o_s with lse = log sum_s exp(lse_s), over the splits that the
    tile's rows see.
    """
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M
    if IS_CAUSAL:
        # A split wrote this tile if its first key is not after the tile's last row. Tiles here are
        # no larger than the forward's and divide them, so a split that a row needs was written for
        # all rows of this tile.
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


# ---- backward ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_COUNTS)
def delta_kernel(
    o, do, delta, o_b, o_h, o_t, do_b, do_h, do_t, num_heads, num_queries,
    HEAD_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(o * do), which equals rowsum(P * dP): the part of the softmax's gradient that
    is a row's own.
    """
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M
    b = head // num_heads
    h = head % num_heads
    o_MD = _load_rows(
        o, b, h, row, o_b, o_h, o_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D, False, True
    )
    do_MD = _load_rows(
        do, b, h, row, do_b, do_h, do_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D, False, True
    )
    rows_M = row + tl.arange(0, BLOCK_M)
    delta_M = tl.sum(o_MD.to(tl.float32) * do_MD.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * num_queries + rows_M, delta_M, mask=rows_M < num_queries)


@triton.jit
def _dq_loop(
    dq_MD, q_MD, do_MD, lse2_M, delta_M, k, v, b, h, start, stop, row, k_b, k_h, k_t, v_b, v_h, v_t, num_keys,
    scale_log2,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, HEAD_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
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
            if IS_CAUSAL:
                visible = visible & (rows_M[:, None] >= (col + cols_N)[None, :])
            p_MN = tl.where(visible, p_MN, 0.0)
        ds_MN = p_MN * (dp_MN - delta_M[:, None])
        dq_MD = tl.dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD, input_precision=PRECISION)
    return dq_MD


@triton.jit(do_not_specialize=_COUNTS)
def dq_kernel(
    q, k, v, do, o, lse, delta, dq,  # q, k, v and do are descriptors if USE_TMA
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, o_b, o_h, o_t, dq_b, dq_h, dq_t,
    num_heads, all_heads, num_queries, num_keys, num_tiles, section, chunk, dq_split, scale_log2, scale,
    IS_CAUSAL: tl.constexpr, HAS_TAIL: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
):  # fmt: skip
    """dq = scale (P * (do v^T - delta)) k for one tile of queries and one chunk of the keys; writes
    delta as well.

    delta is made here because this kernel holds do already and runs first: one launch and one
    reading of do fewer.
    """
    row, head, b, h, kv_h, split, first, last = _query_program(
        num_tiles, num_heads, all_heads, num_keys, section, chunk, IS_CAUSAL, GROUP, BLOCK_M)  # fmt: skip
    if IS_CAUSAL and SPLIT:  # noqa: SIM102 - this tile sees nothing of the chunk, and the sum over parts knows
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
        if split == 0:  # never empty
            tl.store(delta + own + rows_M, delta_M, mask=rows_M < num_queries)
    else:
        tl.store(delta + own + rows_M, delta_M, mask=rows_M < num_queries)
    lse2_M = tl.load(lse + own + rows_M, mask=rows_M < num_queries, other=float("inf")) * LOG2_E

    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = _end_of_whole_tiles(first, last, row, IS_CAUSAL, BLOCK_N)
    dq_MD = _dq_loop(
        dq_MD, q_MD, do_MD, lse2_M, delta_M, k, v, b, kv_h, first, whole, row, k_b, k_h, k_t, v_b, v_h, v_t, num_keys,
        scale_log2, IS_CAUSAL, False, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, USE_TMA)  # fmt: skip
    if HAS_TAIL:
        dq_MD = _dq_loop(
            dq_MD, q_MD, do_MD, lse2_M, delta_M, k, v, b, kv_h, whole, last, row, k_b, k_h, k_t, v_b, v_h, v_t,
            num_keys, scale_log2, IS_CAUSAL, True, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            USE_TMA)  # fmt: skip
    dq += tl.cast(split, tl.int64) * dq_split
    _store_rows(
        dq, dq_MD * scale, b, h, row, dq_b, dq_h, dq_t, num_queries, HEAD_WIDTH, BLOCK_M, BLOCK_D
    )


@triton.jit
def _dkdv_loop(
    dk_ND, dv_ND, k_ND, v_ND, q, do, lse, delta, dq, b, kv_h, start, stop, col, q_b, q_h, q_t, do_b, do_h, do_t,
    num_heads, num_queries, num_keys, scale_log2, scale,
    MASK: tl.constexpr, MASK_KEYS: tl.constexpr, GROUP: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr, WITH_DQ: tl.constexpr, ORDER: tl.constexpr, GRADS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Rows start .. stop of every query head that shares the key head: one loop over both, to
    pipeline as one.
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
            do,
            b,
            h,
            row,
            do_b,
            do_h,
            do_t,
            num_queries,
            HEAD_WIDTH,
            BLOCK_M,
            BLOCK_D,
            USE_TMA,
            True,
        )
        # A query past the end has an infinite log-sum-exp: its probabilities are zero without
        # another mask.
        lse2_M = (
            _load_numbers(lse + own + rows_M, rows_M < num_queries, float("inf"), BLOCK_M, THREADS)
            * LOG2_E
        )
        if ORDER != "late":
            delta_M = _load_numbers(
                delta + own + rows_M, rows_M < num_queries, 0.0, BLOCK_M, THREADS
            )
        # Scores transposed, so that P^T and dS^T leave the matrix unit in the registers they are
        # needed in next.
        # sums that start at -lse and -delta: neither is held beside the product
        if ORDER == "folded":
            s_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) - (lse2_M * (1.0 / scale_log2))[None, :]
            s_NM = tl.dot(k_ND, q_MD.T, s_NM, input_precision=PRECISION)
            dp_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) - delta_M[None, :]
            dp_NM = tl.dot(v_ND, do_MD.T, dp_NM, input_precision=PRECISION)
            p_NM = tl.exp2(s_NM * scale_log2)
        else:
            s_NM = tl.dot(k_ND, q_MD.T, input_precision=PRECISION)
            if ORDER == "early" and GRADS != 1:
                dp_NM = tl.dot(v_ND, do_MD.T, input_precision=PRECISION)
            p_NM = tl.exp2(s_NM * scale_log2 - lse2_M[None, :])
        if MASK:
            p_NM = tl.where(rows_M[None, :] >= cols_N[:, None], p_NM, 0.0)
        # only where keys are summed over: a key past the end spoils no row but its own otherwise
        if MASK_KEYS:
            p_NM = tl.where((cols_N < num_keys)[:, None], p_NM, 0.0)
        if GRADS != 2:
            dv_ND = tl.dot(p_NM.to(do_MD.dtype), do_MD, dv_ND, input_precision=PRECISION)
        if GRADS != 1:
            if ORDER == "late":
                # dP and delta only now: with the scores still in registers they would not fit.
                dp_NM = tl.dot(v_ND, do_MD.T, input_precision=PRECISION)
                delta_M = _load_numbers(
                    delta + own + rows_M, rows_M < num_queries, 0.0, BLOCK_M, THREADS
                )
            if ORDER == "folded":
                ds_NM = (p_NM * dp_NM).to(q_MD.dtype)
            else:
                ds_NM = (p_NM * (dp_NM - delta_M[None, :])).to(q_MD.dtype)
            dk_ND = tl.dot(ds_NM, q_MD, dk_ND, input_precision=PRECISION)
        if WITH_DQ:
            part_MD = tl.dot(ds_NM.T, k_ND, input_precision=PRECISION) * scale
            if USE_TMA:
                dq.atomic_add([b, h, row, 0], part_MD.reshape(1, 1, BLOCK_M, BLOCK_D))
            else:
                d = tl.arange(0, BLOCK_D)
                mask = (rows_M < num_queries)[:, None] & (d < HEAD_WIDTH)[None, :]
                first = dq + (own + row) * HEAD_WIDTH
                tl.atomic_add(
                    first + local_M[:, None] * HEAD_WIDTH + d[None, :],
                    part_MD,
                    mask=mask,
                    sem="relaxed",
                )
    return dk_ND, dv_ND


@triton.jit(do_not_specialize=_COUNTS)
def dkdv_kernel(
    # q, k, v, do and dq are descriptors if USE_TMA; dq only if WITH_DQ
    q, k, v, do, lse, delta, dk, dv, dq,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    num_heads, all_kv_heads, num_queries, num_keys, num_tiles, section, chunk, dk_split, dv_split, scale_log2, scale,
    IS_CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr, WITH_DQ: tl.constexpr, ORDER: tl.constexpr, GRADS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """dv = P^T do and dk = scale (P * (do v^T - delta))^T q for one tile of keys and one chunk of
    the queries.

    WITH_DQ also adds this tile's share of dq to an fp32 buffer: five products instead of seven in
    the whole backward, at the price of an order of summation that changes from run to run.
    """
    col, _, b, kv_h, split, first, last = _key_program(
        num_tiles,
        num_heads,
        all_kv_heads,
        num_queries,
        section,
        chunk,
        IS_CAUSAL,
        GROUP,
        BLOCK_M,
        BLOCK_N,
    )
    if IS_CAUSAL and SPLIT:  # noqa: SIM102 - part 0 is written in any case: with zeros, if no query sees this tile
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
    if IS_CAUSAL:  # from here on, the tile's first query sees the last key of this tile
        whole = tl.minimum(tl.cdiv(col + BLOCK_N - 1, BLOCK_M) * BLOCK_M, tl.maximum(first, last))
        whole = tl.maximum(whole, first)
        dk_ND, dv_ND = _dkdv_loop(
            dk_ND, dv_ND, k_ND, v_ND, q, do, lse, delta, dq, b, kv_h, first, whole, col,
            q_b, q_h, q_t, do_b, do_h, do_t, num_heads, num_queries, num_keys, scale_log2, scale,
            True, MASK_KEYS, GROUP, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, USE_TMA,
            WITH_DQ, ORDER, GRADS, THREADS)  # fmt: skip
    dk_ND, dv_ND = _dkdv_loop(
        dk_ND, dv_ND, k_ND, v_ND, q, do, lse, delta, dq, b, kv_h, whole, last, col,
        q_b, q_h, q_t, do_b, do_h, do_t, num_heads, num_queries, num_keys, scale_log2, scale,
        False, MASK_KEYS, GROUP, HEAD_WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, USE_TMA,
        WITH_DQ, ORDER, GRADS, THREADS)  # fmt: skip
    dk += tl.cast(split, tl.int64) * dk_split
    dv += tl.cast(split, tl.int64) * dv_split
    if GRADS != 1:
        _store_rows(
            dk,
            dk_ND * scale,
            b,
            kv_h,
            col,
            dk_b,
            dk_h,
            dk_t,
            num_keys,
            HEAD_WIDTH,
            BLOCK_N,
            BLOCK_D,
        )
    if GRADS != 2:
        _store_rows(
            dv, dv_ND, b, kv_h, col, dv_b, dv_h, dv_t, num_keys, HEAD_WIDTH, BLOCK_N, BLOCK_D
        )


@triton.jit(do_not_specialize=_COUNTS)
def sum_parts_kernel(
    parts, first_out, second_out,
    a_b, a_h, a_t, b_b, b_h, b_t, num_heads, num_rows, num_splits, chunk, out_parts, part_split, tile_rows, step,
    other_rows,
    FROM_FIRST: tl.constexpr, TO_LAST: tl.constexpr, HEAD_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = sum over the splits that were written, in their order: the same bits in every run. One
    or two outputs.

    FROM_FIRST (causal dq): rows see the chunks up to their own. TO_LAST (causal dk, dv): keys are
    seen by the chunks from their own on, or by none, and then split 0 holds zeros. Both repeat the
    writer's arithmetic.
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


def interpreting():
    return not isinstance(forward_kernel, triton.JITFunction)


# ---- forward, host side --------------------------------------------------------------------------------------------


class _ForwardPlan(NamedTuple):
    num_splits: int
    main: Launch
    combine: Launch | None


@functools.lru_cache(maxsize=512)
def _plan_forward(case):
    tiles = case.tiles("forward")
    num_splits, chunk = case.split("forward", tiles)
    if num_splits > 1:
        main = _forward_launch(case, tiles, num_splits, chunk)
        return _ForwardPlan(num_splits, main, _combine_launch(case, num_splits, chunk))
    if hopper is not None and hopper.takes(case):
        return _ForwardPlan(1, hopper.forward_launch(case), None)
    return _ForwardPlan(1, _forward_launch(case, tiles, 1, chunk), None)


def _forward_launch(case, tiles, num_splits, chunk):
    batch, num_heads, num_queries, head_width = case.q.shape
    num_keys = case.k.shape[2]
    num_tiles = triton.cdiv(num_queries, tiles.block_q)
    all_heads = batch * num_heads
    section = case.section(
        num_keys, num_heads=all_heads, num_tiles=num_tiles, per_sm=tiles.programs_per_sm
    )
    return Launch(
        forward_kernel,
        (num_tiles * all_heads, num_splits, 1),
        (*case.q.steps, *case.k.steps, *case.v.steps, *(case.o.steps if num_splits == 1 else _part_steps(case.q)),
         num_heads, all_heads, num_queries, num_keys, num_tiles, section, chunk, *_part_sizes(case),
         case.scale * math.log2(math.e)),
        {"IS_CAUSAL": case.is_causal, "HAS_TAIL": case.is_causal or num_keys % tiles.block_k != 0,
         "SPLIT": num_splits > 1, "GROUP": case.group,
         "HEAD_WIDTH": head_width, "BLOCK_D": case.width, "BLOCK_M": tiles.block_q, "BLOCK_N": tiles.block_k,
         "PRECISION": case.products(tiles), "USE_TMA": tiles.use_tma},
        tiles,
        boxes=boxes_of(tiles, case.width, (case.q, tiles.block_q), (case.k, tiles.block_k), (case.v, tiles.block_k)),
    )  # fmt: skip


def _combine_launch(case, num_splits, chunk):
    batch, num_heads, num_queries, head_width = case.q.shape
    return Launch(
        combine_kernel,
        (batch * num_heads, triton.cdiv(num_queries, 16), 1),
        (*case.o.steps, num_heads, num_queries, num_splits, chunk, *_part_sizes(case)),
        {
            "IS_CAUSAL": case.is_causal,
            "HEAD_WIDTH": head_width,
            "BLOCK_D": case.width,
            "BLOCK_M": 16,
        },
    )


def _part_sizes(case):
    """Numbers of a part of o, and of one of lse."""
    num_rows = math.prod(case.q.shape[:3])
    return num_rows * case.q.shape[3], num_rows


@on_device
def forward(q, k, v, is_causal, scale, *, num_splits=None):
    """o and the log-sum-exp of q (B, H, T_q, D) and k, v (B, K, T_k, D), H a multiple of K. lse is
    fp32 (B, H, T_q).
    """
    q, k, v = rows_last(q), rows_last(k), rows_last(v)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return o, lse
    case = case_of(q, k, v, is_causal, scale, num_splits, o=o)
    step, stream = _plan_forward(case), stream_of(q)
    _run_forward(step, stream, q, k, v, o, lse)
    if extension.takes(case):
        _offer_forward(case, step, q, k, v, o.numel(), lse.numel())
    return o, lse


def _run_forward(step, stream, q, k, v, o, lse):
    if step.combine is None:
        step.main(stream, q, k, v, o, lse)
        return
    parts = torch.empty(
        step.num_splits * (o.numel() + lse.numel()), dtype=torch.float32, device=q.device
    )
    o_parts, lse_parts = parts, parts[step.num_splits * o.numel() :]
    step.main(stream, q, k, v, o_parts, lse_parts)
    step.combine(stream, o_parts, lse_parts, o, lse)


def _offer_forward(case, step, q, k, v, num_o, num_lse):
    """The same launches as numbers: q, k, v, o, lse, then the parts."""
    main, outs = [(0, 0), (1, 0), (2, 0)], [(3, 0), (4, 0)]
    scratch, calls = (), ((step.main, (*main, *outs)),)
    if step.combine is not None:
        parts = [(5, 0), (5, step.num_splits * num_o)]
        scratch = (step.num_splits * (num_o + num_lse),)
        calls = ((step.main, (*main, *parts)), (step.combine, (*parts, *outs)))
    extension.offer(case, (q, k, v), 5, scratch, calls)


# ---- backward, host side -------------------------------------------------------------------------------------------


class _BackwardPlan(NamedTuple):
    """Of dq, or of dk and dv."""

    num_splits: int
    mains: tuple[Launch, ...]
    reduce: Launch | None
    in_thirds: bool = False

    @property
    def main(self):
        """The first, which is the only one but where dk and dv are made apart."""
        return self.mains[0]


def _part_steps(view):
    _, num_heads, num_rows, head_width = view.shape
    return (num_heads * num_rows * head_width, num_rows * head_width, head_width)


def _view_of(like, steps):
    """A fresh tensor's view: of that shape, with rows that lie together."""
    return View(like.shape, (*steps, 1), 0)


def _reduce_launch(view, outs, num_splits, chunk, *, tile_rows, step, other_rows, from_first=False, to_last=False,
                   head_width, width):  # fmt: skip
    batch, num_heads, num_rows, _ = view.shape
    part = batch * num_heads * num_rows * head_width
    return Launch(
        sum_parts_kernel,
        (batch * num_heads, triton.cdiv(num_rows, 16), len(outs)),
        (*outs[0], *outs[-1], num_heads, num_rows, num_splits, chunk, num_splits * part, part, tile_rows, step,
         other_rows),
        {"FROM_FIRST": from_first, "TO_LAST": to_last, "HEAD_WIDTH": head_width, "BLOCK_D": width, "BLOCK": 16},
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _plan_dq(case, dq_steps):
    in_thirds = bf16x3.takes(case)
    tiles = case.tiles("dq_thirds" if in_thirds else "dq")
    launch = bf16x3.dq_launch if in_thirds else _dq_launch
    num_splits, chunk = case.split("dq", tiles)
    if num_splits > 1:
        main = launch(case, tiles, num_splits, chunk, _part_steps(case.q))
        reduce = _reduce_launch(
            case.q, [dq_steps], num_splits, chunk, tile_rows=tiles.block_q, step=tiles.block_k,
            other_rows=case.k.shape[2], from_first=case.is_causal, head_width=case.q.shape[3],
            width=case.width)  # fmt: skip
        return _BackwardPlan(num_splits, (main,), reduce, in_thirds)
    dq = _view_of(case.q, dq_steps)
    if hopper_backward is not None and hopper_backward.takes_dq(case, dq):
        return _BackwardPlan(1, (hopper_backward.dq_launch(case, dq),), None)
    return _BackwardPlan(1, (launch(case, tiles, 1, chunk, dq_steps),), None, in_thirds)


def _dq_launch(case, tiles, num_splits, chunk, steps):
    batch, num_heads, num_queries, head_width = case.q.shape
    num_keys = case.k.shape[2]
    num_tiles = triton.cdiv(num_queries, tiles.block_q)
    all_heads = batch * num_heads
    section = case.section(
        num_keys, num_heads=all_heads, num_tiles=num_tiles, per_sm=tiles.programs_per_sm
    )
    return Launch(
        dq_kernel,
        (num_tiles * all_heads, num_splits, 1),
        (*case.q.steps, *case.k.steps, *case.v.steps, *case.do.steps, *case.o.steps, *steps,
         num_heads, all_heads, num_queries, num_keys, num_tiles, section, chunk,
         all_heads * num_queries * head_width, case.scale * math.log2(math.e), case.scale),
        {"IS_CAUSAL": case.is_causal, "HAS_TAIL": case.is_causal or num_keys % tiles.block_k != 0,
         "SPLIT": num_splits > 1, "GROUP": case.group,
         "HEAD_WIDTH": head_width, "BLOCK_D": case.width, "BLOCK_M": tiles.block_q, "BLOCK_N": tiles.block_k,
         "PRECISION": case.products(tiles), "USE_TMA": tiles.use_tma},
        tiles,
        boxes=boxes_of(tiles, case.width, (case.q, tiles.block_q), (case.k, tiles.block_k), (case.v, tiles.block_k),
                     (case.do, tiles.block_q)),
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _plan_dkdv(case, dk_steps, dv_steps, with_dq, grads=3):
    kernel = "fused" if with_dq else "dkdv"
    in_thirds = not with_dq and grads == 3 and bf16x3.takes(case)
    tiles = case.tiles("dkdv_thirds" if in_thirds else kernel)
    num_splits, chunk = case.split(kernel, tiles)

    def launches(steps):
        if in_thirds:
            return bf16x3.dkdv_launches(case, tiles, num_splits, chunk, steps)
        return (_dkdv_launch(case, tiles, num_splits, chunk, steps, with_dq, grads),)

    if num_splits > 1:
        reduce = _reduce_launch(
            case.k, [dk_steps, dv_steps], num_splits, chunk, tile_rows=tiles.block_k, step=tiles.block_q,
            other_rows=case.q.shape[2], to_last=case.is_causal, head_width=case.q.shape[3],
            width=case.width)  # fmt: skip
        return _BackwardPlan(num_splits, launches(_part_steps(case.k) * 2), reduce, in_thirds)
    outs = _view_of(case.k, dk_steps), _view_of(case.k, dv_steps)
    if (
        hopper_backward is not None
        and grads == 3
        and not with_dq
        and hopper_backward.takes_dkdv(case, *outs)
    ):
        return _BackwardPlan(1, (hopper_backward.dkdv_launch(case, *outs),), None)
    return _BackwardPlan(1, launches((*dk_steps, *dv_steps)), None, in_thirds)


def _dkdv_launch(case, tiles, num_splits, chunk, steps, with_dq, grads):
    batch, num_heads, num_queries, head_width = case.q.shape
    num_kv_heads, num_keys = case.k.shape[1:3]
    num_tiles = triton.cdiv(num_keys, tiles.block_k)
    all_kv_heads = batch * num_kv_heads
    part = all_kv_heads * num_keys * head_width
    section = case.section(num_queries * case.group, num_heads=all_kv_heads, num_tiles=num_tiles,
                           per_sm=tiles.programs_per_sm)  # fmt: skip
    boxes = boxes_of(tiles, case.width, (case.q, tiles.block_q), (case.k, tiles.block_k), (case.v, tiles.block_k),
                   (case.do, tiles.block_q))  # fmt: skip
    if with_dq and boxes:
        boxes = (
            *boxes,
            (8, _view_of(case.q, _part_steps(case.q)), [1, 1, tiles.block_q, case.width]),
        )
    return Launch(
        dkdv_kernel,
        (num_tiles * all_kv_heads, num_splits, 1),
        (*case.q.steps, *case.k.steps, *case.v.steps, *case.do.steps, *steps,
         num_heads, all_kv_heads, num_queries, num_keys, num_tiles, section, chunk,
         part, part, case.scale * math.log2(math.e), case.scale),
        {"IS_CAUSAL": case.is_causal, "MASK_KEYS": with_dq and num_keys % tiles.block_k != 0,
         "SPLIT": num_splits > 1, "GROUP": case.group,
         "HEAD_WIDTH": head_width, "BLOCK_D": case.width, "BLOCK_M": tiles.block_q, "BLOCK_N": tiles.block_k,
         "PRECISION": case.products(tiles), "USE_TMA": tiles.use_tma, "WITH_DQ": with_dq,
         "ORDER": tiles.order, "GRADS": grads, "THREADS": 32 * tiles.num_warps},
        tiles,
        boxes=boxes,
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _plan_delta(case, dq_steps):
    """The launches around the fused kernel: delta before it, and dq in its own type and layout
    after it.
    """
    batch, num_heads, num_queries, head_width = case.q.shape
    delta = Launch(
        delta_kernel,
        (batch * num_heads, triton.cdiv(num_queries, 32), 1),
        (*case.o.steps, *case.do.steps, num_heads, num_queries),
        {"HEAD_WIDTH": head_width, "BLOCK_D": case.width, "BLOCK_M": 32},
    )
    cast = _reduce_launch(
        case.q, [dq_steps], 1, num_queries, tile_rows=num_queries, step=1, other_rows=1, head_width=head_width,
        width=case.width)  # fmt: skip
    return delta, cast


@on_device
def backward(do, q, k, v, o, lse, is_causal, scale, deterministic=True, *, num_splits=None):
    """(dq, dk, dv) of `forward`, each in its input's type and order of dimensions.

    Deterministic: seven products in two kernels, and sums in a fixed order. Otherwise five products
    in one kernel that adds into dq with atomic instructions.
    """
    do, q, k, v, o = (rows_last(x) for x in (do, q, k, v, o))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    case = case_of(q, k, v, is_causal, scale, num_splits, o=o, do=do)
    deterministic = deterministic or not heuristics.fused_fits(
        itemsize=q.element_size(), head_width=q.shape[3]
    )
    delta = torch.empty_like(lse)
    if deterministic:
        for_dq = _plan_dq(case, dq.stride()[:3])
        for_dkdv = _plan_dkdv(case, dk.stride()[:3], dv.stride()[:3], False)
        whole = cut = q, k, v, do
        if for_dq.in_thirds or for_dkdv.in_thirds:
            cut = bf16x3.cut(case, *whole, o, delta)
        _run_dq(for_dq, *(cut if for_dq.in_thirds else whole), o, lse, delta, dq)
        _run_dkdv(for_dkdv, *(cut if for_dkdv.in_thirds else whole), lse, delta, dk, dv, None)
        if extension.takes(case):
            _offer_backward(case, for_dq, for_dkdv, q, k, v, do, o)
        return dq, dk, dv
    make_delta, cast = _plan_delta(case, dq.stride()[:3])
    dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    stream = stream_of(q)
    make_delta(stream, o, do, delta)
    _run_dkdv(
        _plan_dkdv(case, dk.stride()[:3], dv.stride()[:3], True),
        q,
        k,
        v,
        do,
        lse,
        delta,
        dk,
        dv,
        dq_sum,
    )
    if q.dtype == torch.float32:
        return dq_sum, dk, dv
    cast(stream, dq_sum, dq, dq)
    return dq, dk, dv


def _run_dq(step, q, k, v, do, o, lse, delta, dq):
    out, stream = dq, stream_of(q)
    if step.reduce is not None:
        out = torch.empty((step.num_splits, *dq.shape), dtype=torch.float32, device=dq.device)
    for launch in step.mains:
        launch(stream, q, k, v, do, o, lse, delta, out)
    if step.reduce is not None:
        step.reduce(stream, out, dq, dq)


def _run_dkdv(step, q, k, v, do, lse, delta, dk, dv, dq_sum):
    dk_out, dv_out, stream = dk, dv, stream_of(q)
    if step.reduce is not None:
        parts = torch.empty((2, step.num_splits, *dk.shape), dtype=torch.float32, device=dk.device)
        dk_out, dv_out = parts[0], parts[1]
    for launch in step.mains:
        launch(stream, q, k, v, do, lse, delta, dk_out, dv_out, delta if dq_sum is None else dq_sum)
    if step.reduce is not None:
        step.reduce(stream, parts, dk, dv)


def _offer_backward(case, for_dq, for_dkdv, q, k, v, do, o):
    """The same launches as numbers: do, q, k, v, o, lse, delta, dq, dk, dv, then temporaries.

    These are the thirds of q, k, v and do if there are any, and the parts of dq and of dk and dv.
    """
    do_, q_, k_, v_, o_, lse, delta, dq, dk, dv = [(number, 0) for number in range(10)]
    whole = cut = (q_, k_, v_, do_)
    scratch, calls = [], []

    def temporary(num_floats):
        scratch.append(num_floats)
        return 9 + len(scratch), 0

    if for_dq.in_thirds or for_dkdv.in_thirds:
        cut = tuple(temporary(x.numel() * 3 // 2) for x in (q, k, v, do))
        calls.append((bf16x3.cut_launch(case), (*whole, o_, *cut, delta)))
    parts = dq if for_dq.reduce is None else temporary(for_dq.num_splits * q.numel())
    operands = cut if for_dq.in_thirds else whole
    calls += [(launch, (*operands, o_, lse, delta, parts)) for launch in for_dq.mains]
    if for_dq.reduce is not None:
        calls.append((for_dq.reduce, (parts, dq, dq)))
    dk_out, dv_out = dk, dv
    if for_dkdv.reduce is not None:
        dk_out = temporary(2 * for_dkdv.num_splits * k.numel())
        dv_out = (dk_out[0], for_dkdv.num_splits * k.numel())
    operands = cut if for_dkdv.in_thirds else whole
    calls += [(launch, (*operands, lse, delta, dk_out, dv_out, delta)) for launch in for_dkdv.mains]
    if for_dkdv.reduce is not None:
        calls.append((for_dkdv.reduce, (dk_out, dk, dv)))
    extension.offer(case, (q, k, v, do, o), 10, tuple(scratch), tuple(calls))
