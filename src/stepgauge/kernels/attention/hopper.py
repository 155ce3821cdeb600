"""The attention forward in Gluon for sm_90: one warp copies, two groups of four warps multiply.

Follows FlashAttention-3 (Shah et al. 2024): a producer warp fills rings of key and value tiles
through the copy engine; each of two consumers owns 64 query rows and lets the scores of the next
tile and the product of this one run while it exponentiates. There is one program a multiprocessor,
which fetches its next tile while it finishes this one. What it computes is `forward_kernel` of
triton.py; why it is written so is in docs/kernels/attention.md.

Legend: B batch, H query heads, K key heads, T_q queries, T_k keys, D head width of a tile: the
tensors' may be smaller, the copy engine reads zeros beyond it and writes nothing there; M the 64
query rows of a consumer, N the keys of a tile. A ring is (tiles, barriers of what is ready to be
read, barriers of what is free to be filled).
"""

import itertools
import math
import os
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import heuristics
from .launching import Launch, kept_on

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # a wgmma's, and so a consumer's
TILE_ROWS = gl.constexpr(CONSUMERS.value * ROWS.value)
BLOCK_N = gl.constexpr(128)
Q_STAGES = gl.constexpr(2)  # tiles of queries of each consumer
# tiles of keys, and of values, by a tile's width: at 128 shared memory holds no more
NUM_STAGES = {64: 3, 128: 2}
# Registers of a thread as launched, of a consumer's and of the producer's: they move within 64 Ki a
# program.
REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 168, gl.constexpr(240), gl.constexpr(24)
LN_2 = gl.constexpr(math.log(2.0))


@gluon.jit
def _own_turns(turns):
    """(where this program's tiles stand in what `_deal` made, how many they are)."""
    first = gl.load(turns + gl.program_id(0))
    return turns + first, gl.load(turns + gl.program_id(0) + 1) - first


@gluon.jit
def _place(number, sizes, IS_CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """(batch, head, first row, number of key tiles) of the number of a tile of queries."""
    num_heads, _, num_keys, num_tiles = sizes
    tile, head = number % num_tiles, number // num_tiles
    last = num_keys
    if IS_CAUSAL:
        last = gl.minimum(last, (tile + 1) * TILE_ROWS)
    return head // num_heads, head % num_heads, tile * TILE_ROWS, gl.cdiv(last, BLOCK_N)


@gluon.jit
def _advance(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring, and the phase of its barriers."""
    at_end = slot == STAGES - 1
    return gl.where(at_end, 0, slot + 1), gl.where(at_end, phase ^ 1, phase)


@gluon.jit
def _copy(x, b, h, row, ready, tile):
    mbarrier.expect(ready, x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [b, h, row, 0], ready, tile)


@gluon.jit
def _produce(inputs, rings, sizes, group, turns, IS_CAUSAL: gl.constexpr):
    """Copies what the consumers read, as far ahead as the rings are long."""
    q, k, v = inputs
    q_ring, k_ring, v_ring = rings
    q_tiles, q_ready, q_free = q_ring
    k_tiles, k_ready, k_free = k_ring
    v_tiles, v_ready, v_free = v_ring
    STAGES: gl.constexpr = k_tiles.shape[0]
    # a fresh barrier counts as past its phase 1: every slot is free
    slot, phase, q_slot, q_phase = 0, 1, 0, 1
    own, rounds = _own_turns(turns)
    number = gl.load(own)
    for round_ in range(rounds):
        b, h, row, num_steps = _place(number, sizes, IS_CAUSAL, BLOCK_N)
        number = gl.load(own + round_ + 1)  # early, and one more than there are
        for step in range(num_steps):
            mbarrier.wait(k_free.index(slot), phase)
            _copy(k, b, h // group, step * BLOCK_N, k_ready.index(slot), k_tiles.index(slot))
            if step == 0:
                for consumer in gl.static_range(CONSUMERS):
                    place = consumer * Q_STAGES + q_slot
                    mbarrier.wait(q_free.index(place), q_phase)
                    _copy(
                        q, b, h, row + consumer * ROWS, q_ready.index(place), q_tiles.index(place)
                    )
            mbarrier.wait(v_free.index(slot), phase)
            _copy(v, b, h // group, step * BLOCK_N, v_ready.index(slot), v_tiles.index(slot))
            slot, phase = _advance(slot, phase, STAGES)
        q_slot, q_phase = _advance(q_slot, q_phase, Q_STAGES)


@gluon.jit
def _softmax(
    s_MN,
    max_M,
    total_M,
    rows_M,
    col,
    num_keys,
    scale_log2,
    MASK: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """(p, max, total, what to multiply earlier sums by) after one more tile of scores."""
    if MASK:
        cols_N = gl.arange(0, s_MN.shape[1], gl.SliceLayout(0, s_MN.type.layout))
        if IS_CAUSAL:
            seen_M = gl.minimum(rows_M + 1, num_keys) - col
            s_MN = gl.where(cols_N[None, :] < seen_M[:, None], s_MN, float("-inf"))
        else:
            s_MN = gl.where((cols_N < num_keys - col)[None, :], s_MN, float("-inf"))
    # One fused multiply-add an element: the scale is positive, so the maximum may be taken before
    # it.
    new_max_M = gl.maximum(max_M, gl.max(s_MN, 1) * scale_log2)
    p_MN = gl.exp2(s_MN * scale_log2 - new_max_M[:, None])
    shrink_M = gl.exp2(max_M - new_max_M)
    return p_MN, new_max_M, total_M * shrink_M + gl.sum(p_MN, 1), shrink_M


@gluon.jit
def _round(p_MN, DTYPE: gl.constexpr):
    """Two numbers an instruction, and out of sight of LLVM, which would keep them in float32 until
    they are read.
    """
    if gl.bfloat16 == DTYPE:
        p_MN = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p_MN], gl.bfloat16, True, 2
        )
    else:
        p_MN = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p_MN], gl.float16, True, 2
        )
    return p_MN


@gluon.jit
def _rows(tile):
    """A copied tile as rows of the head width."""
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def _issue_scores(q_MD, k_tile, S_LAYOUT: gl.constexpr):
    N: gl.constexpr = k_tile.shape[2]
    zeros = gl.zeros([ROWS, N], gl.float32, S_LAYOUT)
    return warpgroup_mma(q_MD, _rows(k_tile).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_output(p, v_tile, acc_MD):
    return warpgroup_mma(p, _rows(v_tile), acc_MD, is_async=True)


@gluon.jit
def _shrink(acc_MD, shrink_M, O_LAYOUT: gl.constexpr):
    return acc_MD * gl.convert_layout(shrink_M, gl.SliceLayout(1, O_LAYOUT))[:, None]


@gluon.jit
def _overlapped(
    p, acc_MD, max_M, total_M, q_MD, k_ring, v_ring, start, stop, k_slot, k_phase, v_slot, v_phase, rows_M, num_keys,
    scale_log2, MASK: gl.constexpr, IS_CAUSAL: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Steps start .. stop: the scores of a step and the product of the step before are issued
    together.
    """
    k_tiles, k_ready, k_free = k_ring
    v_tiles, v_ready, v_free = v_ring
    STAGES: gl.constexpr = k_tiles.shape[0]
    for step in range(start, stop):
        mbarrier.wait(k_ready.index(k_slot), k_phase)
        s_MN = _issue_scores(q_MD, k_tiles.index(k_slot), S_LAYOUT)
        mbarrier.wait(v_ready.index(v_slot), v_phase)
        acc_MD = _issue_output(p, v_tiles.index(v_slot), acc_MD)
        s_MN = warpgroup_mma_wait(1, deps=(s_MN,))
        mbarrier.arrive(k_free.index(k_slot))
        p_MN, max_M, total_M, shrink_M = _softmax(
            s_MN, max_M, total_M, rows_M, step * BLOCK_N, num_keys, scale_log2, MASK, IS_CAUSAL)  # fmt: skip
        p_MN = _round(p_MN, k_tiles.dtype)
        # Known to be ready: this only ends the basic block. Within one, ptxas moves the
        # exponentials behind the wait for the product, and nothing overlaps.
        mbarrier.wait(v_ready.index(v_slot), v_phase)
        acc_MD = warpgroup_mma_wait(0, deps=(acc_MD,))
        mbarrier.arrive(v_free.index(v_slot))
        acc_MD = _shrink(acc_MD, shrink_M, O_LAYOUT)
        p = gl.convert_layout(p_MN, P_LAYOUT)
        k_slot, k_phase = _advance(k_slot, k_phase, STAGES)
        v_slot, v_phase = _advance(v_slot, v_phase, STAGES)
    return p, acc_MD, max_M, total_M, k_slot, k_phase, v_slot, v_phase


@gluon.jit
def _consume(work, INDEX: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Consumer INDEX: its 64 rows of every tile of queries that this program has."""
    o, lse, rings, sizes, turns, scale_log2 = work
    q_ring, k_ring, v_ring = rings
    q_tiles, q_ready, q_free = q_ring
    k_tiles, k_ready, k_free = k_ring
    v_tiles, v_ready, v_free = v_ring
    num_heads, num_queries, num_keys = sizes[0], sizes[1], sizes[2]
    STAGES: gl.constexpr = k_tiles.shape[0]
    D: gl.constexpr = k_tiles.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    k_slot, k_phase, v_slot, v_phase, q_slot, q_phase = 0, 0, 0, 0, 0, 0
    own, rounds = _own_turns(turns)
    number = gl.load(own)
    for round_ in range(rounds):
        b, h, row, num_steps = _place(number, sizes, IS_CAUSAL, BLOCK_N)
        number = gl.load(own + round_ + 1)  # early, and one more than there are
        row += INDEX * ROWS
        rows_M = row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        # Whole tiles need no mask: every key of theirs exists and is seen by the first row.
        whole = num_keys // BLOCK_N
        if IS_CAUSAL:
            whole = gl.minimum(whole, (row + 1) // BLOCK_N)
        acc_MD = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        max_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        total_M = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        place = INDEX * Q_STAGES + q_slot
        q_tile = q_tiles.index(place)
        q_MD = _rows(q_tile)
        mbarrier.wait(q_ready.index(place), q_phase)
        # The first tile's scores go ahead: from there on a step has the scores of its tile and the
        # product of the last.
        mbarrier.wait(k_ready.index(k_slot), k_phase)
        s_MN = _issue_scores(q_MD, k_tiles.index(k_slot), S_LAYOUT)
        s_MN = warpgroup_mma_wait(0, deps=(s_MN,))
        mbarrier.arrive(k_free.index(k_slot))
        k_slot, k_phase = _advance(k_slot, k_phase, STAGES)
        p_MN, max_M, total_M, _ = _softmax(
            s_MN, max_M, total_M, rows_M, 0, num_keys, scale_log2, True, IS_CAUSAL)  # fmt: skip
        p = gl.convert_layout(_round(p_MN, k_tiles.dtype), P_LAYOUT)
        whole = gl.maximum(whole, 1)
        p, acc_MD, max_M, total_M, k_slot, k_phase, v_slot, v_phase = _overlapped(
            p, acc_MD, max_M, total_M, q_MD, k_ring, v_ring, 1, whole, k_slot, k_phase, v_slot, v_phase, rows_M,
            num_keys, scale_log2, False, IS_CAUSAL, S_LAYOUT, O_LAYOUT, P_LAYOUT)  # fmt: skip
        p, acc_MD, max_M, total_M, k_slot, k_phase, v_slot, v_phase = _overlapped(
            p, acc_MD, max_M, total_M, q_MD, k_ring, v_ring, whole, num_steps, k_slot, k_phase, v_slot, v_phase, rows_M,
            num_keys, scale_log2, True, IS_CAUSAL, S_LAYOUT, O_LAYOUT, P_LAYOUT)  # fmt: skip
        mbarrier.wait(v_ready.index(v_slot), v_phase)
        acc_MD = _issue_output(p, v_tiles.index(v_slot), acc_MD)
        acc_MD = warpgroup_mma_wait(0, deps=(acc_MD,))
        mbarrier.arrive(v_free.index(v_slot))
        v_slot, v_phase = _advance(v_slot, v_phase, STAGES)
        # The rows of q are not read again: what they become goes out through their place.
        q_MD.store(_shrink(acc_MD, 1.0 / total_M, O_LAYOUT).to(k_tiles.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o, [b, h, row, 0], q_tile)
        lse_M = (max_M + gl.log2(total_M)) * LN_2
        head = (b * num_heads + h).to(gl.int64)
        gl.store(lse + head * num_queries + rows_M, lse_M, mask=rows_M < num_queries)
        tma.store_wait(0)
        mbarrier.arrive(q_free.index(place))
        q_slot, q_phase = _advance(q_slot, q_phase, Q_STAGES)


@gluon.jit
def _ring(box, LENGTH: gl.constexpr, READERS: gl.constexpr):
    shape: gl.constexpr = [LENGTH] + box.block_type.shape  # noqa: RUF005 - Gluon knows no stars
    tiles = gl.allocate_shared_memory(box.dtype, shape, box.layout)
    ready = gl.allocate_shared_memory(gl.int64, [LENGTH, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [LENGTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LENGTH):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=READERS)
    return tiles, ready, free


@gluon.jit(
    do_not_specialize=["num_heads", "group", "num_queries", "num_keys", "num_tiles"],
)
def forward_kernel(
    q, k, v, o,  # descriptors of boxes (1, 1, ROWS, D) for q and o, (1, 1, BLOCK_N, D) for k and v
    lse, turns, num_heads, group, num_queries, num_keys, num_tiles, scale_log2,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """o and its log-sum-exp for the tiles of TILE_ROWS queries that `turns` deals out to the
    programs.
    """
    rings = (
        _ring(q, CONSUMERS * Q_STAGES, 1),
        _ring(k, STAGES, CONSUMERS),
        _ring(v, STAGES, CONSUMERS),
    )
    sizes = (num_heads, num_queries, num_keys, num_tiles)
    work = (o, lse, rings, sizes, turns, scale_log2)
    gl.warp_specialize([
        (_consume, (work, 0, IS_CAUSAL)),
        (_consume, (work, 1, IS_CAUSAL)),
        (_produce, ((q, k, v), rings, sizes, group, turns, IS_CAUSAL)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# ---- host side -----------------------------------------------------------------------------------------------------

OPT_OUT = "STEPGAUGE_GLUON"
DTYPES = (torch.bfloat16, torch.float16)
# Gluon is experimental: it is taken where this kernel was compiled. It has run with 3.6.
IS_KNOWN = triton.__version__.startswith(("3.6.", "3.8."))


def takes(case):
    """Whether the forward is the one written here."""
    views = (case.q, case.k, case.v, case.o)
    return tile_width(case) in NUM_STAGES and can_run(case, *views) and fills_chip(case, case.q)


def tile_width(case):
    return heuristics.block_width(case.q.shape[3])


def can_run(case, *views):
    """Whether the chip, the type and the views are those that kernels in Gluon run on, and nobody
    chose otherwise.
    """
    return (
        IS_KNOWN
        and os.environ.get(OPT_OUT) != "0"
        and case.chip.arch == 90
        and case.dtype in DTYPES
        and case.num_splits is None
        and not case.overrides
        and all(view.tma_reads(case.dtype.itemsize) for view in views)
    )


def fills_chip(case, owned):
    """Whether there is a tile for each multiprocessor: with fewer, portable tiles, half as long,
    busy more of it.
    """
    return math.prod(owned.shape[:2]) * _tiles_of_head(owned) >= case.chip.num_sms


def forward_launch(case):
    """The launch on q, k, v, o and lse."""
    steps = [triton.cdiv(keys, BLOCK_N.value) for keys in _keys_seen(case)]
    return launch_of(
        forward_kernel, case, owned=case.q, deal=deal_of(case, case.q, steps, loop_length=case.k.shape[2]),
        boxes=((0, case.q, ROWS), (1, case.k, BLOCK_N), (2, case.v, BLOCK_N), (3, case.o, ROWS)),
        scalars=(case.scale * math.log2(math.e),), constants={"STAGES": NUM_STAGES[tile_width(case)]},
    )  # fmt: skip


def _keys_seen(case):
    """How many keys each tile of queries sees."""
    ends = range(TILE_ROWS.value, (_tiles_of_head(case.q) + 1) * TILE_ROWS.value, TILE_ROWS.value)
    return [min(case.k.shape[2], end) if case.is_causal else case.k.shape[2] for end in ends]


class Deal(NamedTuple):
    """Programs that stay, one a multiprocessor, and what the kernel reads of which tiles each of
    them has.
    """

    programs: int
    turns: torch.Tensor


def deal_of(case, owned, steps, *, loop_length):
    """steps: of each tile of a head of `owned`, which loops over `loop_length` rows at most."""
    heads = math.prod(owned.shape[:2])
    programs = min(heads * len(steps), case.chip.num_sms)
    section = case.section(loop_length, num_heads=heads, num_tiles=len(steps))
    return Deal(programs, _turns(case.device, programs, heads, section, tuple(steps)))


_kept: dict[tuple, torch.Tensor] = {}  # for good: C++ keeps the address


def _turns(*key):
    """The one list of a key, whichever thread makes it first."""
    return _kept[key] if key in _kept else _kept.setdefault(key, _make_turns(*key))


def _make_turns(device, programs, heads, section, steps):
    """Where each program's tiles begin, where the last one's end, then all tiles and one number
    that is read ahead.
    """
    dealt = heuristics.deal_tiles(steps, num_heads=heads, section=section, num_programs=programs)
    begins = itertools.accumulate(map(len, dealt), initial=programs + 1)
    turns = torch.tensor([*begins, *itertools.chain(*dealt), 0], dtype=torch.int32, device="cpu")
    return turns if device is None else kept_on(device, turns)


def launch_of(kernel, case, *, owned, boxes, scalars, constants, deal=None, strides=()):
    """The launch of a kernel whose programs own tiles of `owned`: those of a deal, or else one
    each.

    boxes: (position, view, rows of the box). The kernel's numbers are `strides`, what is counted
    here, and `scalars`.
    """
    batch, num_heads = owned.shape[:2]
    num_tiles = _tiles_of_head(owned)
    return Launch(
        kernel,
        (deal.programs if deal else batch * num_heads * num_tiles, 1, 1),
        (*([deal.turns] if deal else []), *strides, num_heads, case.group, case.q.shape[2], case.k.shape[2], num_tiles,
         *scalars),
        {"IS_CAUSAL": case.is_causal, **constants},
        boxes=tuple((position, view, [1, 1, rows.value, tile_width(case)]) for position, view, rows in boxes),
        options={"num_warps": 4, "maxnreg": REGISTERS},
        describe=_describe,
    )  # fmt: skip


def _tiles_of_head(view):
    return triton.cdiv(view.shape[2], TILE_ROWS.value)


def _describe(tensor, shape, strides, box):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(tensor, shape, strides, box, layout)
