"""The float32 backward on sm_90, with each operand split once into three bf16 tensors.

A float32 number is the sum of three bf16 numbers of 8 bits each, x = x0 + x1 + x2. A product of two
tiles is the sum of six bf16 products; the other three (x2 y2, x2 y1 and x1 y2) are below float32's
rounding. The portable kernels split both operands in every step of every loop. Here a kernel splits
them beforehand, and the loops split only P and dS. The kernels compute the same as `dq_kernel` and
`dkdv_kernel` of backward.py, without atomics and bitwise reproducibly.

Legend: B batch, H query heads, K key heads (H = K * group), T_q queries, T_k keys, D head width; M
queries and N keys of a tile. q3 etc. are a tensor's parts, (3, B * H, T, D).
"""

import functools
import math
import os

import torch
import triton
import triton.language as tl

from .launching import PlannedLaunch, TensorDescriptor, View, stream_of
from .tile_ops import (
    _COUNTS,
    LOG2_E,
    _key_program,
    _load_numbers,
    _load_rows,
    _query_program,
    _store_rows,
)

OPT_OUT = "STEPGAUGE_BF16X3"
WIDTHS = (64, 128)
_BLOCK = 64  # rows that a program of cut_kernel splits
# The gradients that one launch computes, by head width: 1 dv, 2 dk, 3 both. At 128 the sums of both
# and a product do not fit in registers.
_GRADS = {64: (3,), 128: (1, 2)}


# ---- splitting -----------------------------------------------------------------------------------------------------


@triton.jit
def _cut(x):
    upper = x.to(tl.bfloat16)
    rest = x - upper.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return upper, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _cut_rows(
    x, x3, head, row, x_b, x_h, x_t, num_heads, all_heads, num_rows, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    num_rows = tl.where(head < all_heads, num_rows, 0)
    rows = _load_rows(
        x,
        head // num_heads,
        head % num_heads,
        row,
        x_b,
        x_h,
        x_t,
        num_rows,
        D,
        BLOCK,
        D,
        False,
        True,
    )
    step = tl.cast(num_rows, tl.int64) * D
    part = all_heads * step
    upper, middle, lower = _cut(rows)
    _store_rows(x3, upper, 0, head, row, part, step, D, num_rows, D, BLOCK, D)
    _store_rows(x3, middle, 1, head, row, part, step, D, num_rows, D, BLOCK, D)
    _store_rows(x3, lower, 2, head, row, part, step, D, num_rows, D, BLOCK, D)
    return rows


@triton.jit(do_not_specialize=(*_COUNTS, "num_kv_heads"))
def cut_kernel(
    q, k, v, do, o, q3, k3, v3, do3, delta,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, o_b, o_h, o_t,
    num_heads, all_heads, num_queries, num_kv_heads, all_kv_heads, num_keys, num_tiles,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the three parts of q, k, v and do, and delta = rowsum(o * do)."""
    head, row, which = (
        tl.program_id(0) // num_tiles,
        tl.program_id(0) % num_tiles * BLOCK,
        tl.program_id(1),
    )
    if which == 0:
        _cut_rows(q, q3, head, row, q_b, q_h, q_t, num_heads, all_heads, num_queries, D, BLOCK)
    elif which == 1:
        _cut_rows(k, k3, head, row, k_b, k_h, k_t, num_kv_heads, all_kv_heads, num_keys, D, BLOCK)
    elif which == 2:
        _cut_rows(v, v3, head, row, v_b, v_h, v_t, num_kv_heads, all_kv_heads, num_keys, D, BLOCK)
    else:
        do_MD = _cut_rows(
            do, do3, head, row, do_b, do_h, do_t, num_heads, all_heads, num_queries, D, BLOCK
        )
        num_rows = tl.where(head < all_heads, num_queries, 0)
        o_MD = _load_rows(o, head // num_heads, head % num_heads, row, o_b, o_h, o_t, num_rows, D, BLOCK, D, False,
                          True)  # fmt: skip
        rows_M = row + tl.arange(0, BLOCK)
        delta_M = tl.sum(o_MD * do_MD, 1)
        tl.store(delta + head.to(tl.int64) * num_queries + rows_M, delta_M, mask=rows_M < num_rows)


# ---- products of parts --------------------------------------------------------------------------------------------


@triton.jit
def _load_parts(
    x3, head, row, part, num_rows, BLOCK: tl.constexpr, D: tl.constexpr, USE_TMA: tl.constexpr
):
    # Rows past the end are loaded as zeros. The step between heads is computed here in 64 bits,
    # because a 32-bit argument may not hold it.
    step = tl.cast(num_rows, tl.int64) * D
    upper = _load_rows(x3, 0, head, row, part, step, D, num_rows, D, BLOCK, D, USE_TMA, True)
    middle = _load_rows(x3, 1, head, row, part, step, D, num_rows, D, BLOCK, D, USE_TMA, True)
    lower = _load_rows(x3, 2, head, row, part, step, D, num_rows, D, BLOCK, D, USE_TMA, True)
    return upper, middle, lower


@triton.jit
def _multiply(a, b):
    """Returns a b, adding the small products first. Each call starts a new sum, because the tensor
    cores truncate when they add, and the error would grow over a whole loop.
    """
    s = tl.dot(a[2], b[0])
    s = tl.dot(a[0], b[2], s)
    s = tl.dot(a[1], b[1], s)
    s = tl.dot(a[1], b[0], s)
    s = tl.dot(a[0], b[1], s)
    return tl.dot(a[0], b[0], s)


@triton.jit
def _multiply_transposed(a, b):
    """Returns a b^T."""
    return _multiply(a, (b[0].T, b[1].T, b[2].T))


# ---- dq ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_COUNTS)
def dq_kernel(
    q3, k3, v3, do3, unused, lse, delta, dq,  # the parts are descriptors if USE_TMA
    q_part, k_part, dq_b, dq_h, dq_t,
    num_heads, all_heads, num_queries, num_keys, num_tiles, section, chunk, dq_split, scale_log2, scale,
    IS_CAUSAL: tl.constexpr, HAS_TAIL: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Computes dq = scale (P * (do v^T - delta)) k for one tile of queries, one chunk of the
    keys.
    """
    row, head, b, h, _, split, first, last = _query_program(
        num_tiles, num_heads, all_heads, num_keys, section, chunk, IS_CAUSAL, GROUP, BLOCK_M)  # fmt: skip
    if IS_CAUSAL and SPLIT:  # noqa: SIM102 - a tile that sees no key of the chunk; sum_parts_kernel skips it
        if first >= last:
            return
    rows_M = row + tl.arange(0, BLOCK_M)
    cols_N = tl.arange(0, BLOCK_N)
    own = head.to(tl.int64) * num_queries
    q_MD = _load_parts(q3, head, row, q_part, num_queries, BLOCK_M, D, USE_TMA)
    do_MD = _load_parts(do3, head, row, q_part, num_queries, BLOCK_M, D, USE_TMA)
    lse2_M = tl.load(lse + own + rows_M, mask=rows_M < num_queries, other=float("inf")) * LOG2_E
    delta_M = tl.load(delta + own + rows_M, mask=rows_M < num_queries, other=0.0)
    dq_MD = tl.zeros([BLOCK_M, D], tl.float32)
    for col in tl.range(first, last, BLOCK_N):
        k_ND = _load_parts(k3, head // GROUP, col, k_part, num_keys, BLOCK_N, D, USE_TMA)
        v_ND = _load_parts(v3, head // GROUP, col, k_part, num_keys, BLOCK_N, D, USE_TMA)
        p_MN = tl.exp2(_multiply_transposed(q_MD, k_ND) * scale_log2 - lse2_M[:, None])
        if HAS_TAIL:
            visible = (col + cols_N < num_keys)[None, :]
            if IS_CAUSAL:
                visible = visible & (rows_M[:, None] >= (col + cols_N)[None, :])
            p_MN = tl.where(visible, p_MN, 0.0)
        dp_MN = _multiply_transposed(do_MD, v_ND)
        dq_MD += _multiply(_cut(p_MN * (dp_MN - delta_M[:, None])), k_ND)
    dq += tl.cast(split, tl.int64) * dq_split
    _store_rows(dq, dq_MD * scale, b, h, row, dq_b, dq_h, dq_t, num_queries, D, BLOCK_M, D)


# ---- dk and dv -----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_COUNTS)
def dkdv_kernel(
    q3, k3, v3, do3, lse, delta, dk, dv,  # the parts are descriptors if USE_TMA
    q_part, k_part, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    num_heads, all_kv_heads, num_queries, num_keys, num_tiles, section, chunk, part, scale_log2, scale,
    IS_CAUSAL: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, GRADS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Computes dv = P^T do and dk = scale (P * (do v^T - delta))^T q for one tile of keys and one
    chunk of the queries.
    """
    col, head, b, h, split, first, last = _key_program(
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
    if IS_CAUSAL and SPLIT:  # noqa: SIM102 - split 0 is always written: with zeros if no query sees the tile
        if first >= last and split != 0:
            return
    cols_N = col + tl.arange(0, BLOCK_N)
    local_M = tl.arange(0, BLOCK_M)
    k_ND = _load_parts(k3, head, col, k_part, num_keys, BLOCK_N, D, USE_TMA)
    if GRADS != 1:
        v_ND = _load_parts(v3, head, col, k_part, num_keys, BLOCK_N, D, USE_TMA)
    dk_ND = tl.zeros([BLOCK_N, D], tl.float32)
    dv_ND = tl.zeros([BLOCK_N, D], tl.float32)
    tiles = tl.cdiv(tl.maximum(last - first, 0), BLOCK_M)
    # one loop over all query heads that share the key head
    for index in tl.range(0, tiles * GROUP, 1):
        q_head = head * GROUP + index // tl.maximum(tiles, 1)
        row = first + (index % tl.maximum(tiles, 1)) * BLOCK_M
        rows_M = row + local_M
        own = q_head.to(tl.int64) * num_queries
        q_MD = _load_parts(q3, q_head, row, q_part, num_queries, BLOCK_M, D, USE_TMA)
        do_MD = _load_parts(do3, q_head, row, q_part, num_queries, BLOCK_M, D, USE_TMA)
        # A query past the end gets an infinite log-sum-exp, so that its probabilities are zero
        # without another mask.
        lse2_M = (
            _load_numbers(lse + own + rows_M, rows_M < num_queries, float("inf"), BLOCK_M, THREADS)
            * LOG2_E
        )
        p_NM = tl.exp2(_multiply_transposed(k_ND, q_MD) * scale_log2 - lse2_M[None, :])
        if IS_CAUSAL:
            p_NM = tl.where(rows_M[None, :] >= cols_N[:, None], p_NM, 0.0)
        if GRADS != 2:
            dv_ND += _multiply(_cut(p_NM), do_MD)
        if GRADS != 1:
            dp_NM = _multiply_transposed(v_ND, do_MD)
            delta_M = _load_numbers(
                delta + own + rows_M, rows_M < num_queries, 0.0, BLOCK_M, THREADS
            )
            dk_ND += _multiply(_cut(p_NM * (dp_NM - delta_M[None, :])), q_MD)
    dk += tl.cast(split, tl.int64) * part
    dv += tl.cast(split, tl.int64) * part
    if GRADS != 1:
        _store_rows(dk, dk_ND * scale, b, h, col, dk_b, dk_h, dk_t, num_keys, D, BLOCK_N, D)
    if GRADS != 2:
        _store_rows(dv, dv_ND, b, h, col, dv_b, dv_h, dv_t, num_keys, D, BLOCK_N, D)


# ---- host side -----------------------------------------------------------------------------------------------------


def takes(key):
    """True if the backward runs in the kernels of this file."""
    return (
        os.environ.get(OPT_OUT) != "0"
        and key.chip.arch == 90
        and TensorDescriptor is not None
        and key.dtype == torch.float32
        and key.precision == "ieee"
        and key.q.shape[3] in WIDTHS
        and not key.is_bounded
        and not {"dq", "dkdv"} & {name for name, _ in key.overrides}
    )


def cut(key, q, k, v, do, o, delta):
    """Returns the parts of q, k, v and do, each (3, B * H, T, D) in bf16, and writes delta."""
    parts = [
        torch.empty(_parts_view(x).shape, dtype=torch.bfloat16, device=x.device)
        for x in (q, k, v, do)
    ]
    cut_launch(key)(stream_of(q), q, k, v, do, o, *parts, delta)
    return parts


@functools.lru_cache(maxsize=512)
def cut_launch(key):
    """Returns the launch; its tensors are q, k, v, do, o, the parts of q, k, v and do, and
    delta.
    """
    batch, num_heads, num_queries, head_width = key.q.shape
    num_kv_heads, num_keys = key.k.shape[1:3]
    num_tiles = triton.cdiv(max(num_queries, num_keys), _BLOCK)
    return PlannedLaunch(
        cut_kernel,
        (batch * num_heads * num_tiles, 4, 1),
        (*key.q.steps, *key.k.steps, *key.v.steps, *key.do.steps, *key.o.steps,
         num_heads, batch * num_heads, num_queries, num_kv_heads, batch * num_kv_heads, num_keys, num_tiles),
        {"D": head_width, "BLOCK": _BLOCK},
    )  # fmt: skip


def dq_launch(key, tiles, num_splits, chunk, steps):
    """Returns the launch; its tensors are the parts of q, k, v and do, an unused one, lse, delta
    and dq.
    """
    batch, num_heads, num_queries, head_width = key.q.shape
    num_keys = key.k.shape[2]
    num_tiles = triton.cdiv(num_queries, tiles.block_q)
    all_heads = batch * num_heads
    section = _section(key, num_keys, all_heads, num_tiles, tiles)
    return PlannedLaunch(
        dq_kernel,
        (num_tiles * all_heads, num_splits, 1),
        (math.prod(key.q.shape), math.prod(key.k.shape), *steps,
         num_heads, all_heads, num_queries, num_keys, num_tiles, section, chunk, math.prod(key.q.shape),
         key.scale * math.log2(math.e), key.scale),
        {"IS_CAUSAL": key.is_causal, "HAS_TAIL": key.is_causal or num_keys % tiles.block_k != 0,
         "SPLIT": num_splits > 1, "GROUP": key.group, "D": head_width, "BLOCK_M": tiles.block_q,
         "BLOCK_N": tiles.block_k, "USE_TMA": tiles.use_tma},
        tiles,
        boxes=_boxes(key, tiles),
    )  # fmt: skip


def dkdv_launches(key, tiles, num_splits, chunk, steps):
    """Returns the launches; the tensors of each are the parts of q, k, v and do, lse, delta, dk and
    dv.
    """
    batch, num_heads, num_queries, head_width = key.q.shape
    num_kv_heads, num_keys = key.k.shape[1:3]
    num_tiles = triton.cdiv(num_keys, tiles.block_k)
    all_kv_heads = batch * num_kv_heads
    section = _section(key, num_queries * key.group, all_kv_heads, num_tiles, tiles)
    return tuple(
        PlannedLaunch(
            dkdv_kernel,
            (num_tiles * all_kv_heads, num_splits, 1),
            (math.prod(key.q.shape), math.prod(key.k.shape), *steps,
             num_heads, all_kv_heads, num_queries, num_keys, num_tiles, section, chunk, math.prod(key.k.shape),
             key.scale * math.log2(math.e), key.scale),
            {"IS_CAUSAL": key.is_causal, "SPLIT": num_splits > 1, "GROUP": key.group, "D": head_width,
             "BLOCK_M": tiles.block_q, "BLOCK_N": tiles.block_k, "USE_TMA": tiles.use_tma, "GRADS": grads,
             "THREADS": 32 * tiles.num_warps},
            tiles,
            boxes=_boxes(key, tiles),
        )
        for grads in _GRADS.get(head_width, (3,))
    )  # fmt: skip


def _parts_view(like):
    """Returns the view of the parts of a (B, H, T, D) tensor, which may itself be a View."""
    batch, num_heads, num_rows, head_width = like.shape
    shape = (3, batch * num_heads, num_rows, head_width)
    return View(shape, (math.prod(shape[1:]), num_rows * head_width, head_width, 1), 0)


def _boxes(key, tiles):
    if not tiles.use_tma:
        return ()
    sides = (
        (key.q, tiles.block_q),
        (key.k, tiles.block_k),
        (key.v, tiles.block_k),
        (key.do, tiles.block_q),
    )
    return tuple(
        (i, _parts_view(view), [1, 1, rows, key.width]) for i, (view, rows) in enumerate(sides)
    )


def _section(key, loop_length, num_heads, num_tiles, tiles):
    # Three bf16 parts take 3/2 of the float32 bytes.
    return key.section(
        loop_length * 3 // 2, num_heads=num_heads, num_tiles=num_tiles, per_sm=tiles.programs_per_sm
    )
