"""Runs attention's kernels: which ones a call launches, in which order, on which tensors.

The kernels are in forward.py, backward.py and split.py (Triton), hopper_*.py (Gluon) and bf16x3.py.
docs/log/2026-11-21-attention.md has the derivation, the lower bounds and the experiments.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton

from . import bf16x3, libraries
from .backward import dkdv_kernel, dq_kernel
from .forward import forward_kernel
from .launching import (
    PlannedLaunch,
    View,
    boxes_of,
    launch_key,
    on_device,
    stream_of,
    with_contiguous_rows,
)
from .split import combine_kernel, sum_parts_kernel
from .visible import spans_of

try:
    from . import hopper_launches as hopper
except ImportError:  # pragma: no cover - a Triton without Gluon, or with an incompatible one
    hopper = None


# ---- forward, host side
# --------------------------------------------------------------------------------------------


class _ForwardPlan(NamedTuple):
    num_splits: int
    main: PlannedLaunch
    combine: PlannedLaunch | None


@functools.lru_cache(maxsize=512)
def _plan_forward(key):
    tiles = key.tiles("forward")
    num_splits, chunk = key.split("forward", tiles)
    if num_splits > 1:
        main = _forward_launch(key, tiles, num_splits, chunk)
        return _ForwardPlan(num_splits, main, _combine_launch(key, num_splits, chunk))
    if hopper is not None and hopper.takes_forward(key):
        return _ForwardPlan(1, hopper.forward_launch(key), None)
    return _ForwardPlan(1, _forward_launch(key, tiles, 1, chunk), None)


def _forward_launch(key, tiles, num_splits, chunk):
    batch, num_heads, num_queries, head_width = key.q.shape
    num_keys = key.k.shape[2]
    num_tiles = triton.cdiv(num_queries, tiles.block_q)
    all_heads = batch * num_heads
    section = key.section(
        num_keys, num_heads=all_heads, num_tiles=num_tiles, per_sm=tiles.programs_per_sm
    )
    return PlannedLaunch(
        forward_kernel,
        (num_tiles * all_heads, num_splits, 1),
        (*no_spans(key), *key.q.steps, *key.k.steps, *key.v.steps,
         *(key.o.steps if num_splits == 1 else _part_steps(key.q)),
         num_heads, all_heads, num_queries, num_keys, num_tiles, section, chunk, *_part_sizes(key),
         key.scale * math.log2(math.e)),
        {"IS_CAUSAL": key.is_causal, "HAS_TAIL": key.is_causal or num_keys % tiles.block_k != 0,
         "SPLIT": num_splits > 1, "GROUP": key.group,
         "HEAD_WIDTH": head_width, "BLOCK_D": key.width, "BLOCK_M": tiles.block_q, "BLOCK_N": tiles.block_k,
         "PRECISION": key.products(tiles), "USE_TMA": tiles.use_tma, "WINDOW": key.window, "PACKED": key.is_packed},
        tiles,
        boxes=boxes_of(tiles, key.width, (key.q, tiles.block_q), (key.k, tiles.block_k), (key.v, tiles.block_k)),
    )  # fmt: skip


def no_spans(key):
    """Returns None as the argument for `spans`, a kernel's last tensor, unless sequences are
    packed.
    """
    return () if key.is_packed else (None,)


def _combine_launch(key, num_splits, chunk):
    batch, num_heads, num_queries, head_width = key.q.shape
    return PlannedLaunch(
        combine_kernel,
        (batch * num_heads, triton.cdiv(num_queries, 16), 1),
        (*key.o.steps, num_heads, num_queries, num_splits, chunk, *_part_sizes(key)),
        {
            "IS_CAUSAL": key.is_causal,
            "HEAD_WIDTH": head_width,
            "BLOCK_D": key.width,
            "BLOCK_M": 16,
        },
    )


def _part_sizes(key):
    """Returns the number of elements in one part of o and in one part of lse."""
    num_rows = math.prod(key.q.shape[:3])
    return num_rows * key.q.shape[3], num_rows


@on_device
def forward(q, k, v, is_causal, scale, window=0, cu_seqlens=None, *, num_splits=None):
    """Returns o (B, H, T_q, D) and the fp32 log-sum-exp (B, H, T_q).

    q is (B, H, T_q, D), k and v are (B, K, T_k, D), with H a multiple of K.
    """
    q, k, v = (with_contiguous_rows(x) for x in (q, k, v))
    bounds = {"window": window, "is_packed": cu_seqlens is not None}
    key = launch_key(q, k, v, is_causal, scale, num_splits, o=torch.empty_like(q), **bounds)
    if (by_library := libraries.forward(key, q, k, v, cu_seqlens)) is not None:
        return by_library
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return o, lse
    step, stream = _plan_forward(key), stream_of(q)
    _run_forward(step, stream, q, k, v, o, lse, *_spans(cu_seqlens, q))
    return o, lse


def _spans(cu_seqlens, q):
    """Returns the kernels' `spans` argument in a tuple, which is empty if sequences are not
    packed.
    """
    return () if cu_seqlens is None else (spans_of(cu_seqlens, q.shape[2]),)


def _run_forward(step, stream, q, k, v, o, lse, *spans):
    if step.combine is None:
        step.main(stream, q, k, v, o, lse, *spans)
        return
    parts = torch.empty(
        step.num_splits * (o.numel() + lse.numel()), dtype=torch.float32, device=q.device
    )
    o_parts, lse_parts = parts, parts[step.num_splits * o.numel() :]
    step.main(stream, q, k, v, o_parts, lse_parts)
    step.combine(stream, o_parts, lse_parts, o, lse)


# ---- backward, host side
# -------------------------------------------------------------------------------------------


class _BackwardPlan(NamedTuple):
    """The launches that compute dq, or dk and dv."""

    num_splits: int
    mains: tuple[PlannedLaunch, ...]
    reduce: PlannedLaunch | None
    is_bf16x3: bool = False

    @property
    def main(self):
        """The first launch. There is a second one only if dk and dv have separate launches."""
        return self.mains[0]


def _part_steps(view):
    _, num_heads, num_rows, head_width = view.shape
    return (num_heads * num_rows * head_width, num_rows * head_width, head_width)


def _view_of(like, steps):
    """Returns the view of a new tensor of that shape with contiguous rows."""
    return View(like.shape, (*steps, 1), 0)


def _reduce_launch(view, outs, num_splits, chunk, *, tile_rows, step, other_rows, from_first=False, to_last=False,
                   head_width, width):  # fmt: skip
    batch, num_heads, num_rows, _ = view.shape
    part = batch * num_heads * num_rows * head_width
    return PlannedLaunch(
        sum_parts_kernel,
        (batch * num_heads, triton.cdiv(num_rows, 16), len(outs)),
        (*outs[0], *outs[-1], num_heads, num_rows, num_splits, chunk, num_splits * part, part, tile_rows, step,
         other_rows),
        {"FROM_FIRST": from_first, "TO_LAST": to_last, "HEAD_WIDTH": head_width, "BLOCK_D": width, "BLOCK": 16},
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _plan_dq(key, dq_steps):
    is_bf16x3 = bf16x3.takes(key)
    tiles = key.tiles("dq_bf16x3" if is_bf16x3 else "dq")
    launch = bf16x3.dq_launch if is_bf16x3 else _dq_launch
    num_splits, chunk = key.split("dq", tiles)
    if num_splits > 1:
        main = launch(key, tiles, num_splits, chunk, _part_steps(key.q))
        reduce = _reduce_launch(
            key.q, [dq_steps], num_splits, chunk, tile_rows=tiles.block_q, step=tiles.block_k,
            other_rows=key.k.shape[2], from_first=key.is_causal, head_width=key.q.shape[3],
            width=key.width)  # fmt: skip
        return _BackwardPlan(num_splits, (main,), reduce, is_bf16x3)
    dq = _view_of(key.q, dq_steps)
    if hopper is not None and hopper.takes_dq(key, dq):
        return _BackwardPlan(1, (hopper.dq_launch(key, dq),), None)
    return _BackwardPlan(1, (launch(key, tiles, 1, chunk, dq_steps),), None, is_bf16x3)


def _dq_launch(key, tiles, num_splits, chunk, steps):
    batch, num_heads, num_queries, head_width = key.q.shape
    num_keys = key.k.shape[2]
    num_tiles = triton.cdiv(num_queries, tiles.block_q)
    all_heads = batch * num_heads
    section = key.section(
        num_keys, num_heads=all_heads, num_tiles=num_tiles, per_sm=tiles.programs_per_sm
    )
    return PlannedLaunch(
        dq_kernel,
        (num_tiles * all_heads, num_splits, 1),
        (*no_spans(key), *key.q.steps, *key.k.steps, *key.v.steps, *key.do.steps, *key.o.steps, *steps,
         num_heads, all_heads, num_queries, num_keys, num_tiles, section, chunk,
         all_heads * num_queries * head_width, key.scale * math.log2(math.e), key.scale),
        {"IS_CAUSAL": key.is_causal, "HAS_TAIL": key.is_causal or num_keys % tiles.block_k != 0,
         "SPLIT": num_splits > 1, "GROUP": key.group,
         "HEAD_WIDTH": head_width, "BLOCK_D": key.width, "BLOCK_M": tiles.block_q, "BLOCK_N": tiles.block_k,
         "PRECISION": key.products(tiles), "USE_TMA": tiles.use_tma, "WINDOW": key.window, "PACKED": key.is_packed},
        tiles,
        boxes=boxes_of(tiles, key.width, (key.q, tiles.block_q), (key.k, tiles.block_k), (key.v, tiles.block_k),
                     (key.do, tiles.block_q)),
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _plan_dkdv(key, dk_steps, dv_steps):
    is_bf16x3 = bf16x3.takes(key)
    tiles = key.tiles("dkdv_bf16x3" if is_bf16x3 else "dkdv")
    num_splits, chunk = key.split("dkdv", tiles)

    def launches(steps):
        if is_bf16x3:
            return bf16x3.dkdv_launches(key, tiles, num_splits, chunk, steps)
        return (_dkdv_launch(key, tiles, num_splits, chunk, steps),)

    if num_splits > 1:
        reduce = _reduce_launch(
            key.k, [dk_steps, dv_steps], num_splits, chunk, tile_rows=tiles.block_k, step=tiles.block_q,
            other_rows=key.q.shape[2], to_last=key.is_causal, head_width=key.q.shape[3],
            width=key.width)  # fmt: skip
        return _BackwardPlan(num_splits, launches(_part_steps(key.k) * 2), reduce, is_bf16x3)
    outs = _view_of(key.k, dk_steps), _view_of(key.k, dv_steps)
    if hopper is not None and hopper.takes_dkdv(key, *outs):
        return _BackwardPlan(1, (hopper.dkdv_launch(key, *outs),), None)
    return _BackwardPlan(1, launches((*dk_steps, *dv_steps)), None, is_bf16x3)


def _dkdv_launch(key, tiles, num_splits, chunk, steps):
    batch, num_heads, num_queries, head_width = key.q.shape
    num_kv_heads, num_keys = key.k.shape[1:3]
    num_tiles = triton.cdiv(num_keys, tiles.block_k)
    all_kv_heads = batch * num_kv_heads
    part = all_kv_heads * num_keys * head_width
    section = key.section(num_queries * key.group, num_heads=all_kv_heads, num_tiles=num_tiles,
                           per_sm=tiles.programs_per_sm)  # fmt: skip
    return PlannedLaunch(
        dkdv_kernel,
        (num_tiles * all_kv_heads, num_splits, 1),
        (*no_spans(key), *key.q.steps, *key.k.steps, *key.v.steps, *key.do.steps, *steps,
         num_heads, all_kv_heads, num_queries, num_keys, num_tiles, section, chunk,
         part, part, key.scale * math.log2(math.e), key.scale),
        {"IS_CAUSAL": key.is_causal, "SPLIT": num_splits > 1, "GROUP": key.group,
         "HEAD_WIDTH": head_width, "BLOCK_D": key.width, "BLOCK_M": tiles.block_q, "BLOCK_N": tiles.block_k,
         "PRECISION": key.products(tiles), "USE_TMA": tiles.use_tma, "ORDER": tiles.order,
         "THREADS": 32 * tiles.num_warps, "WINDOW": key.window, "PACKED": key.is_packed},
        tiles,
        boxes=boxes_of(tiles, key.width, (key.q, tiles.block_q), (key.k, tiles.block_k), (key.v, tiles.block_k),
                     (key.do, tiles.block_q)),
    )  # fmt: skip


@on_device
def backward(do, q, k, v, o, lse, is_causal, scale, window=0, cu_seqlens=None, *, num_splits=None):
    """Returns (dq, dk, dv) of `forward`, each in its input's type and order of dimensions.

    Two kernels compute seven matrix products and sum in a fixed order: results are bitwise
    reproducible.
    """
    do, q, k, v, o = (with_contiguous_rows(x) for x in (do, q, k, v, o))
    if q.numel() == 0:
        return torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    bounds = {"window": window, "is_packed": cu_seqlens is not None}
    key = launch_key(q, k, v, is_causal, scale, num_splits, o=o, do=do, **bounds)
    if (by_library := libraries.backward(key, do, q, k, v, o, lse, cu_seqlens)) is not None:
        return by_library
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    spans, delta = _spans(cu_seqlens, q), torch.empty_like(lse)
    for_dq = _plan_dq(key, dq.stride()[:3])
    for_dkdv = _plan_dkdv(key, dk.stride()[:3], dv.stride()[:3])
    whole = cut = q, k, v, do
    if for_dq.is_bf16x3 or for_dkdv.is_bf16x3:
        cut = bf16x3.cut(key, *whole, o, delta)
    _run_dq(for_dq, *(cut if for_dq.is_bf16x3 else whole), o, lse, delta, dq, *spans)
    _run_dkdv(for_dkdv, *(cut if for_dkdv.is_bf16x3 else whole), lse, delta, dk, dv, *spans)
    return dq, dk, dv


def _run_dq(step, q, k, v, do, o, lse, delta, dq, *spans):
    out, stream = dq, stream_of(q)
    if step.reduce is not None:
        out = torch.empty((step.num_splits, *dq.shape), dtype=torch.float32, device=dq.device)
    for launch in step.mains:
        launch(stream, q, k, v, do, o, lse, delta, out, *spans)
    if step.reduce is not None:
        step.reduce(stream, out, dq, dq)


def _run_dkdv(step, q, k, v, do, lse, delta, dk, dv, *spans):
    dk_out, dv_out, stream = dk, dv, stream_of(q)
    if step.reduce is not None:
        parts = torch.empty((2, step.num_splits, *dk.shape), dtype=torch.float32, device=dk.device)
        dk_out, dv_out = parts[0], parts[1]
    for launch in step.mains:
        launch(stream, q, k, v, do, lse, delta, dk_out, dv_out, *spans)
    if step.reduce is not None:
        step.reduce(stream, parts, dk, dv)
