"""The attention forward in Gluon for sm_90: one warp copies, two or three groups of four warps multiply.

Follows FlashAttention-3 (Shah et al. 2024): a producer warp fills rings of key and value tiles through the copy
engine; each consumer owns 64 query rows, lets the scores of the next tile and the product of this one run while it
exponentiates, and takes turns with the others at the tensor cores, so that one multiplies while another does softmax.
What it computes is `forward_kernel` of triton.py; why it is written so is in docs/kernels/attention.md.

Legend: B batch, H query heads, K key heads, T_q queries, T_k keys, D head width; M the 64 query rows of a consumer, N
the keys of a tile. A ring is (tiles, barriers of what is ready to be read, barriers of what is free to be filled).
"""

import functools
import math
from typing import NamedTuple

import torch
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

from . import launching, plan
from . import triton as portable

ROWS = gl.constexpr(64)  # a wgmma's, and so a consumer's
LN_2 = gl.constexpr(math.log(2.0))


@gluon.jit
def _locate(index, num_tiles, all_heads, section):
    """(tile, head) of a tile's number: sections of heads that fit in L2 together, within one by tile, then by head."""
    first = (index // (num_tiles * section)) * section
    rest = index % (num_tiles * section)
    width = gl.minimum(section, all_heads - first)
    return rest // width, first + rest % width


@gluon.jit
def _num_rounds(total):
    """How many tiles this program has."""
    programs = gl.num_programs(0)
    rounds = total // programs
    return gl.where(_index_of(rounds) < total, rounds + 1, rounds)


@gluon.jit
def _index_of(round_):
    """The number of this program's tile: there and back over the programs, since tiles get shorter as they go."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return round_ * programs + gl.where(round_ % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _place(index, sizes, IS_CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr):
    """(batch, head, first row, number of key tiles) of a tile's number."""
    num_heads, all_heads, _, num_keys, num_tiles, section = sizes
    tile, head = _locate(index, num_tiles, all_heads, section)
    last = num_keys
    if IS_CAUSAL:  # the last tile sees the most keys: start it first
        tile = num_tiles - 1 - tile
        last = gl.minimum(last, (tile + 1) * CONSUMERS * ROWS)
    return head // num_heads, head % num_heads, tile * CONSUMERS * ROWS, gl.cdiv(last, BLOCK_N)


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
def _produce(
    inputs, rings, sizes, group, total,
    IS_CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Copies what the consumers read, as far ahead as the rings are long."""
    q, k, v = inputs
    q_ring, k_ring, v_ring = rings
    q_tiles, q_ready, q_free = q_ring
    k_tiles, k_ready, k_free = k_ring
    v_tiles, v_ready, v_free = v_ring
    STAGES: gl.constexpr = k_tiles.shape[0]
    Q_STAGES: gl.constexpr = q_tiles.shape[0] // CONSUMERS
    slot, phase, q_slot, q_phase = 0, 1, 0, 1  # a fresh barrier counts as past its phase 1: every slot is free
    for round_ in range(_num_rounds(total)):
        b, h, row, num_steps = _place(_index_of(round_), sizes, IS_CAUSAL, CONSUMERS, BLOCK_N)
        for step in range(num_steps):
            mbarrier.wait(k_free.index(slot), phase)
            _copy(k, b, h // group, step * BLOCK_N, k_ready.index(slot), k_tiles.index(slot))
            if step == 0:
                for consumer in gl.static_range(CONSUMERS):
                    own = consumer * Q_STAGES + q_slot
                    mbarrier.wait(q_free.index(own), q_phase)
                    _copy(q, b, h, row + consumer * ROWS, q_ready.index(own), q_tiles.index(own))
            mbarrier.wait(v_free.index(slot), phase)
            _copy(v, b, h // group, step * BLOCK_N, v_ready.index(slot), v_tiles.index(slot))
            slot, phase = _advance(slot, phase, STAGES)
        q_slot, q_phase = _advance(q_slot, q_phase, Q_STAGES)


@gluon.jit
def _softmax(s_MN, max_M, total_M, rows_M, col, num_keys, scale_log2, MASK: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """(p, max, total, what to multiply earlier sums by) after one more tile of scores."""
    if MASK:
        cols_N = gl.arange(0, s_MN.shape[1], gl.SliceLayout(0, s_MN.type.layout))
        if IS_CAUSAL:
            seen_M = gl.minimum(rows_M + 1, num_keys) - col
            s_MN = gl.where(cols_N[None, :] < seen_M[:, None], s_MN, float("-inf"))
        else:
            s_MN = gl.where((cols_N < num_keys - col)[None, :], s_MN, float("-inf"))
    # One fused multiply-add an element: the scale is positive, so the maximum may be taken before it.
    new_max_M = gl.maximum(max_M, gl.max(s_MN, 1) * scale_log2)
    p_MN = gl.exp2(s_MN * scale_log2 - new_max_M[:, None])
    shrink_M = gl.exp2(max_M - new_max_M)
    return p_MN, new_max_M, total_M * shrink_M + gl.sum(p_MN, 1), shrink_M


@gluon.jit
def _round(p_MN, DTYPE: gl.constexpr):
    """Two numbers an instruction, and out of sight of LLVM, which would keep them in float32 until they are read."""
    if gl.bfloat16 == DTYPE:
        p_MN = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p_MN], gl.bfloat16, True, 2)
    else:
        p_MN = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p_MN], gl.float16, True, 2)
    return p_MN


@gluon.jit
def _issue_scores(q_MD, k_tile, S_LAYOUT: gl.constexpr):
    N: gl.constexpr = k_tile.shape[2]
    k_DN = k_tile.reshape([N, k_tile.shape[3]]).permute((1, 0))
    zeros = gl.zeros([ROWS, N], gl.float32, S_LAYOUT)
    return warpgroup_mma(q_MD, k_DN, zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_output(p, v_tile, acc_MD):
    v_ND = v_tile.reshape([v_tile.shape[2], v_tile.shape[3]])
    return warpgroup_mma(p, v_ND, acc_MD, is_async=True)


@gluon.jit
def _shrink(acc_MD, shrink_M, O_LAYOUT: gl.constexpr):
    return acc_MD * gl.convert_layout(shrink_M, gl.SliceLayout(1, O_LAYOUT))[:, None]


@gluon.jit
def _overlapped(
    p, acc_MD, max_M, total_M, q_MD, k_ring, v_ring, turns, start, stop, k_slot, k_phase, v_slot, v_phase, turn,
    rows_M, num_keys, scale_log2, MASK: gl.constexpr, IS_CAUSAL: gl.constexpr, INDEX: gl.constexpr,
    TAKE_TURNS: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Steps start .. stop: the scores of a step and the product of the step before are issued together."""
    k_tiles, k_ready, k_free = k_ring
    v_tiles, v_ready, v_free = v_ring
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    for step in range(start, stop):
        mbarrier.wait(k_ready.index(k_slot), k_phase)
        if TAKE_TURNS:
            mbarrier.wait(turns.index(INDEX), turn)
        s_MN = _issue_scores(q_MD, k_tiles.index(k_slot), S_LAYOUT)
        mbarrier.wait(v_ready.index(v_slot), v_phase)
        acc_MD = _issue_output(p, v_tiles.index(v_slot), acc_MD)
        if TAKE_TURNS:
            mbarrier.arrive(turns.index((INDEX + 1) % turns.shape[0]))
            turn ^= 1
        s_MN = warpgroup_mma_wait(1, deps=(s_MN,))
        mbarrier.arrive(k_free.index(k_slot))
        p_MN, max_M, total_M, shrink_M = _softmax(
            s_MN, max_M, total_M, rows_M, step * BLOCK_N, num_keys, scale_log2, MASK, IS_CAUSAL)  # fmt: skip
        p_MN = _round(p_MN, k_tiles.dtype)
        # Known to be ready: this only ends the basic block. Within one, ptxas moves the exponentials behind the wait
        # for the product, and nothing overlaps.
        mbarrier.wait(v_ready.index(v_slot), v_phase)
        acc_MD = warpgroup_mma_wait(0, deps=(acc_MD,))
        mbarrier.arrive(v_free.index(v_slot))
        acc_MD = _shrink(acc_MD, shrink_M, O_LAYOUT)
        p = gl.convert_layout(p_MN, P_LAYOUT)
        k_slot, k_phase = _advance(k_slot, k_phase, STAGES)
        v_slot, v_phase = _advance(v_slot, v_phase, STAGES)
    return p, acc_MD, max_M, total_M, k_slot, k_phase, v_slot, v_phase, turn


@gluon.jit
def _in_order(
    acc_MD, max_M, total_M, q_MD, k_ring, v_ring, start, stop, slot, phase, rows_M, num_keys, scale_log2,
    MASK: gl.constexpr, IS_CAUSAL: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Steps start .. stop, each product waited for: only the other consumers hide the softmax."""
    k_tiles, k_ready, k_free = k_ring
    v_tiles, v_ready, v_free = v_ring
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    for step in range(start, stop):
        mbarrier.wait(k_ready.index(slot), phase)
        s_MN = _issue_scores(q_MD, k_tiles.index(slot), S_LAYOUT)
        s_MN = warpgroup_mma_wait(0, deps=(s_MN,))
        mbarrier.arrive(k_free.index(slot))
        p_MN, max_M, total_M, shrink_M = _softmax(
            s_MN, max_M, total_M, rows_M, step * BLOCK_N, num_keys, scale_log2, MASK, IS_CAUSAL)  # fmt: skip
        acc_MD = _shrink(acc_MD, shrink_M, O_LAYOUT)
        p = gl.convert_layout(_round(p_MN, k_tiles.dtype), P_LAYOUT)
        mbarrier.wait(v_ready.index(slot), phase)
        acc_MD = _issue_output(p, v_tiles.index(slot), acc_MD)
        acc_MD = warpgroup_mma_wait(0, deps=(acc_MD,))
        mbarrier.arrive(v_free.index(slot))
        slot, phase = _advance(slot, phase, STAGES)
    return acc_MD, max_M, total_M, slot, phase


@gluon.jit
def _consume(
    work, INDEX: gl.constexpr, IS_CAUSAL: gl.constexpr, OVERLAP: gl.constexpr, TAKE_TURNS: gl.constexpr
):  # fmt: skip
    """Consumer INDEX: its 64 rows of every tile of queries that this program has."""
    o, lse, rings, turns, sizes, total, scale_log2 = work
    q_ring, k_ring, v_ring = rings
    q_tiles, q_ready, q_free = q_ring
    k_tiles, k_ready, k_free = k_ring
    v_tiles, v_ready, v_free = v_ring
    num_heads, num_queries, num_keys = sizes[0], sizes[2], sizes[3]
    CONSUMERS: gl.constexpr = turns.shape[0]
    Q_STAGES: gl.constexpr = q_tiles.shape[0] // CONSUMERS
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    D: gl.constexpr = k_tiles.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    k_slot, k_phase, v_slot, v_phase, q_slot, q_phase = 0, 0, 0, 0, 0, 0
    turn = 1 if INDEX == 0 else 0  # the first may go at once
    for round_ in range(_num_rounds(total)):
        b, h, row, num_steps = _place(_index_of(round_), sizes, IS_CAUSAL, CONSUMERS, BLOCK_N)
        row += INDEX * ROWS
        rows_M = row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        # Whole tiles need no mask: every key of theirs exists and is seen by the first row.
        whole = num_keys // BLOCK_N
        if IS_CAUSAL:
            whole = gl.minimum(whole, (row + 1) // BLOCK_N)
        acc_MD = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        max_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        total_M = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        own = INDEX * Q_STAGES + q_slot
        q_tile = q_tiles.index(own)
        q_MD = q_tile.reshape([ROWS, D])
        mbarrier.wait(q_ready.index(own), q_phase)
        if OVERLAP:
            mbarrier.wait(k_ready.index(k_slot), k_phase)
            s_MN = _issue_scores(q_MD, k_tiles.index(k_slot), S_LAYOUT)
            s_MN = warpgroup_mma_wait(0, deps=(s_MN,))
            mbarrier.arrive(k_free.index(k_slot))
            k_slot, k_phase = _advance(k_slot, k_phase, STAGES)
            p_MN, max_M, total_M, _ = _softmax(
                s_MN, max_M, total_M, rows_M, 0, num_keys, scale_log2, True, IS_CAUSAL)  # fmt: skip
            p = gl.convert_layout(_round(p_MN, k_tiles.dtype), P_LAYOUT)
            whole = gl.maximum(whole, 1)
            p, acc_MD, max_M, total_M, k_slot, k_phase, v_slot, v_phase, turn = _overlapped(
                p, acc_MD, max_M, total_M, q_MD, k_ring, v_ring, turns, 1, whole, k_slot, k_phase, v_slot, v_phase,
                turn, rows_M, num_keys, scale_log2, False, IS_CAUSAL, INDEX, TAKE_TURNS, S_LAYOUT, O_LAYOUT,
                P_LAYOUT)  # fmt: skip
            p, acc_MD, max_M, total_M, k_slot, k_phase, v_slot, v_phase, turn = _overlapped(
                p, acc_MD, max_M, total_M, q_MD, k_ring, v_ring, turns, whole, num_steps, k_slot, k_phase, v_slot,
                v_phase, turn, rows_M, num_keys, scale_log2, True, IS_CAUSAL, INDEX, TAKE_TURNS, S_LAYOUT, O_LAYOUT,
                P_LAYOUT)  # fmt: skip
            mbarrier.wait(v_ready.index(v_slot), v_phase)
            acc_MD = _issue_output(p, v_tiles.index(v_slot), acc_MD)
            acc_MD = warpgroup_mma_wait(0, deps=(acc_MD,))
            mbarrier.arrive(v_free.index(v_slot))
            v_slot, v_phase = _advance(v_slot, v_phase, STAGES)
        else:
            acc_MD, max_M, total_M, k_slot, k_phase = _in_order(
                acc_MD, max_M, total_M, q_MD, k_ring, v_ring, 0, whole, k_slot, k_phase, rows_M, num_keys,
                scale_log2, False, IS_CAUSAL, S_LAYOUT, O_LAYOUT, P_LAYOUT)  # fmt: skip
            acc_MD, max_M, total_M, k_slot, k_phase = _in_order(
                acc_MD, max_M, total_M, q_MD, k_ring, v_ring, whole, num_steps, k_slot, k_phase, rows_M, num_keys,
                scale_log2, True, IS_CAUSAL, S_LAYOUT, O_LAYOUT, P_LAYOUT)  # fmt: skip
        # The rows of q are not read again: what they become goes out through their place.
        q_MD.store(_shrink(acc_MD, 1.0 / total_M, O_LAYOUT).to(k_tiles.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o, [b, h, row, 0], q_tile)
        lse_M = (max_M + gl.log2(total_M)) * LN_2
        head = (b * num_heads + h).to(gl.int64)
        gl.store(lse + head * num_queries + rows_M, lse_M, mask=rows_M < num_queries)
        tma.store_wait(0)
        mbarrier.arrive(q_free.index(own))
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
    do_not_specialize=["num_heads", "all_heads", "group", "num_queries", "num_keys", "num_tiles", "section", "total"],
)
def forward_kernel(
    q, k, v, o,  # descriptors of boxes (1, 1, 64, D) for q and o, (1, 1, BLOCK_N, D) for k and v
    lse, num_heads, all_heads, group, num_queries, num_keys, num_tiles, section, total, scale_log2,
    IS_CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, OVERLAP: gl.constexpr, TAKE_TURNS: gl.constexpr, REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """o and its log-sum-exp for the `total` tiles of CONSUMERS x 64 queries, shared out over the programs."""
    rings = (_ring(q, CONSUMERS * Q_STAGES, 1), _ring(k, STAGES, CONSUMERS), _ring(v, STAGES, CONSUMERS))
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=1)
    sizes = (num_heads, all_heads, num_queries, num_keys, num_tiles, section)
    work = (o, lse, rings, turns, sizes, total, scale_log2)
    BLOCK_N: gl.constexpr = k.block_type.shape[2]
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (work, 0, IS_CAUSAL, OVERLAP, TAKE_TURNS)),
            (_consume, (work, 1, IS_CAUSAL, OVERLAP, TAKE_TURNS)),
            (_produce, ((q, k, v), rings, sizes, group, total, IS_CAUSAL, CONSUMERS, BLOCK_N)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (work, 0, IS_CAUSAL, OVERLAP, TAKE_TURNS)),
            (_consume, (work, 1, IS_CAUSAL, OVERLAP, TAKE_TURNS)),
            (_consume, (work, 2, IS_CAUSAL, OVERLAP, TAKE_TURNS)),
            (_produce, ((q, k, v), rings, sizes, group, total, IS_CAUSAL, CONSUMERS, BLOCK_N)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# ---- host side -----------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """How a program is built: consumers of 64 queries each, keys of a tile, lengths of the rings, and what overlaps.

    `overlap`: a consumer's softmax runs beside its own products; `take_turns`: consumers issue products one after the
    other; `persistent`: one program a multiprocessor, which fetches its next tile while it finishes this one.
    """

    consumers: int
    block_k: int
    stages: int
    q_stages: int = 1
    overlap: bool = True
    take_turns: bool = True
    persistent: bool = True

    @property
    def registers(self):
        """(a thread as launched, of a consumer, of the producer): setmaxnreg moves them within 64 Ki a program."""
        return {2: (168, 240, 24), 3: (128, 160, 24)}[self.consumers]


SHAPES = {64: Shape(2, 128, 3), 128: Shape(2, 128, 2)}
WIDTHS = tuple(SHAPES)
DTYPES = (torch.bfloat16, torch.float16)


def _describe(tensor, shape, strides, box):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(tensor, shape, strides, box, layout)


@functools.lru_cache(maxsize=512)
def _plan(case, chosen):
    """The launch, or None where the copy engine cannot read the tensors."""
    batch, num_heads, num_queries, head_width = case.q.shape
    num_keys = case.k.shape[2]
    views = (case.q, case.k, case.v, case.o)
    if not all(view.tma_reads(case.dtype.itemsize) for view in views):
        return None
    num_tiles = -(-num_queries // (chosen.consumers * ROWS.value))
    total = num_tiles * batch * num_heads
    programs = min(total, launching.device_of(case.device).num_sms) if chosen.persistent else total
    maxnreg, registers, producer_registers = chosen.registers
    edges = (ROWS.value, chosen.block_k, chosen.block_k, ROWS.value)
    boxes = zip(views, edges, strict=True)
    return launching.Launch(
        forward_kernel,
        (programs, 1, 1),
        (num_heads, batch * num_heads, case.group, num_queries, num_keys, num_tiles, case.section(num_keys), total,
         case.scale * math.log2(math.e)),
        {"IS_CAUSAL": case.is_causal, "CONSUMERS": chosen.consumers, "STAGES": chosen.stages,
         "Q_STAGES": chosen.q_stages, "OVERLAP": chosen.overlap, "TAKE_TURNS": chosen.take_turns,
         "REGISTERS": registers, "PRODUCER_REGISTERS": producer_registers},
        boxes=tuple((i, view, [1, 1, rows, head_width]) for i, (view, rows) in enumerate(boxes)),
        options={"num_warps": 4, "maxnreg": maxnreg},
        describe=_describe,
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _is_split(case):
    """Whether few heads leave the chip idle, so that the portable kernel is the faster one, in parts."""
    return case.split("forward", case.tiles("forward"))[0] > 1


@launching.on_device
def forward(q, k, v, is_causal, scale, *, shape=None):
    """o and the log-sum-exp as `triton.forward` gives them; that one runs where this cannot, or for few heads.

    `shape`: for tuning, how the program is built, also for few heads.
    """
    q, k, v = (launching.rows_last(x) for x in (q, k, v))
    if q.numel() == 0:
        return portable.forward(q, k, v, is_causal, scale)
    o = torch.empty_like(q)
    case = launching.case_of(q, k, v, is_causal, scale, None, o=o)
    launch = _plan(case, shape or SHAPES[q.shape[3]])
    if launch is None or (shape is None and _is_split(case)):
        return portable.forward(q, k, v, is_causal, scale)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    launch(launching.stream_of(q), q, k, v, o, lse)
    return o, lse


def register():
    """Puts this forward in the place of the portable one, for the types and widths that it is written for."""
    for dtype in DTYPES:
        for width in WIDTHS:
            plan.register_path("forward", forward, arch=90, dtype=dtype, head_width=width)
