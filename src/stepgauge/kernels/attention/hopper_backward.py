"""The attention backward in Gluon for sm_90: dq, then dk and dv, each with a warp that copies and
groups that multiply.

As in hopper.py, each of two consumers (four warps) owns 64 rows, and what it loops over comes
through a ring that a producer warp fills. dq owns queries and loops over keys; dk and dv own keys
and loop over queries, on transposed scores, so that the probabilities are in the registers in which
the next product wants them. In a step the exponentials run beside the product for dP, and what
follows dP beside the next products. What is computed is that of `dq_kernel` and `dkdv_kernel` of
triton.py: seven products, no atomics, the same bits every time.

Legend: B batch, H query heads, K key heads, T_q queries, T_k keys, D head width; M queries and N
keys of a tile.
"""

import math

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .hopper import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    ROWS,
    TILE_ROWS,
    _advance,
    _issue_output,
    _issue_scores,
    _own_turns,
    _place,
    _round,
    _rows,
    can_run,
    deal_of,
    fills_chip,
    launch_of,
    tile_width,
)

BLOCK = gl.constexpr(64)  # rows of a tile of what is looped over
# tiles of keys and values, by their width; at 64 the portable dq is the faster one
DQ_STAGES = {128: 3}
DKDV_STAGES = {64: 4, 128: 2}  # tiles of queries and their gradients
# tiles of keys and values that each consumer of dkdv owns: it has the next one's early
KV_STAGES = gl.constexpr(2)
LOG2_E = gl.constexpr(math.log2(math.e))


@gluon.jit
def _tiles(box, LENGTH: gl.constexpr):
    shape: gl.constexpr = [LENGTH] + box.block_type.shape  # noqa: RUF005 - Gluon knows no stars
    return gl.allocate_shared_memory(box.dtype, shape, box.layout)


@gluon.jit
def _barriers(LENGTH: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [LENGTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LENGTH):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def _copy_pair(first, second, b, h, row, ready, first_tile, second_tile):
    """One tile of each of two tensors, behind one barrier."""
    mbarrier.expect(ready, first.block_type.nbytes + second.block_type.nbytes)
    tma.async_copy_global_to_shared(first, [b, h, row, 0], ready, first_tile)
    tma.async_copy_global_to_shared(second, [b, h, row, 0], ready, second_tile)


# ---- dq ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _number(all_heads, num_tiles, section, IS_CAUSAL: gl.constexpr):
    """The number of this program's tile: sections of heads that fit in L2 together, within one the
    longest first.
    """
    index = gl.program_id(0)
    first = (index // (num_tiles * section)) * section
    rest = index % (num_tiles * section)
    width = gl.minimum(section, all_heads - first)
    tile, head = rest // width, first + rest % width
    return head * num_tiles + (num_tiles - 1 - tile if IS_CAUSAL else tile)


@gluon.jit
def _produce_dq(inputs, rings, number, sizes, group, IS_CAUSAL: gl.constexpr):
    q, k, v, do = inputs
    q_tiles, do_tiles, q_ready, k_tiles, v_tiles, ready, free = rings
    STAGES: gl.constexpr = k_tiles.shape[0]
    slot, phase = 0, 1  # a fresh barrier counts as past its phase 1: every slot is free
    b, h, row, num_steps = _place(number, sizes, IS_CAUSAL, BLOCK)
    for step in range(num_steps):
        mbarrier.wait(free.index(slot), phase)
        _copy_pair(
            k,
            v,
            b,
            h // group,
            step * BLOCK,
            ready.index(slot),
            k_tiles.index(slot),
            v_tiles.index(slot),
        )
        if step == 0:
            for consumer in gl.static_range(CONSUMERS):
                _copy_pair(q, do, b, h, row + consumer * ROWS, q_ready.index(consumer), q_tiles.index(consumer),
                           do_tiles.index(consumer))  # fmt: skip
        slot, phase = _advance(slot, phase, STAGES)


@gluon.jit
def _dq_steps(
    dq_MD, q_MD, do_MD, lse2_M, delta_M, rings, start, stop, slot, phase, rows_M, num_keys, scale_log2,
    MASK: gl.constexpr, IS_CAUSAL: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Steps start .. stop: the exponentials run beside dP's product."""
    _, _, _, k_tiles, v_tiles, ready, free = rings
    STAGES: gl.constexpr = k_tiles.shape[0]
    for step in range(start, stop):
        mbarrier.wait(ready.index(slot), phase)
        s_MN = _issue_scores(q_MD, k_tiles.index(slot), S_LAYOUT)
        dp_MN = _issue_scores(do_MD, v_tiles.index(slot), S_LAYOUT)
        s_MN = warpgroup_mma_wait(1, deps=(s_MN,))
        p_MN = gl.exp2(s_MN * scale_log2 - lse2_M[:, None])
        if MASK:
            cols_N = gl.arange(0, BLOCK, gl.SliceLayout(0, S_LAYOUT))
            seen_M = num_keys + rows_M * 0
            if IS_CAUSAL:
                seen_M = gl.minimum(rows_M + 1, num_keys)
            p_MN = gl.where(cols_N[None, :] < (seen_M - step * BLOCK)[:, None], p_MN, 0.0)
        # Known to be ready: this only ends the basic block. Within one, ptxas moves the
        # exponentials behind the wait.
        mbarrier.wait(ready.index(slot), phase)
        dp_MN = warpgroup_mma_wait(0, deps=(dp_MN,))
        ds = gl.convert_layout(_round(p_MN * (dp_MN - delta_M[:, None]), k_tiles.dtype), P_LAYOUT)
        dq_MD = _issue_output(ds, k_tiles.index(slot), dq_MD)
        dq_MD = warpgroup_mma_wait(0, deps=(dq_MD,))
        mbarrier.arrive(free.index(slot))
        slot, phase = _advance(slot, phase, STAGES)
    return dq_MD, slot, phase


@gluon.jit
def _consume_dq(work, INDEX: gl.constexpr, IS_CAUSAL: gl.constexpr, HEAD_WIDTH: gl.constexpr):
    """Consumer INDEX: dq, and delta on the way, of its 64 rows of this program's tile of queries."""
    o, o_strides, lse, delta, dq, rings, number, sizes, scale_log2, scale = work
    q_tiles, do_tiles, q_ready, k_tiles, _, _, _ = rings
    num_heads, num_queries, num_keys = sizes[0], sizes[1], sizes[2]
    D: gl.constexpr = k_tiles.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    b, h, row, num_steps = _place(number, sizes, IS_CAUSAL, BLOCK)
    row += INDEX * ROWS
    own_rows = (b * num_heads + h).to(gl.int64) * num_queries
    rows_M = row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    exists_M = rows_M < num_queries
    # A query past the end has an infinite log-sum-exp: its probabilities are zero without another
    # mask.
    lse2_M = gl.load(lse + own_rows + rows_M, mask=exists_M, other=float("inf")) * LOG2_E
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, D_LAYOUT))
    cols = gl.arange(0, D, gl.SliceLayout(0, D_LAYOUT))
    head_of_o = (
        o
        + b.to(gl.int64) * o_strides[0]
        + h.to(gl.int64) * o_strides[1]
        + row.to(gl.int64) * o_strides[2]
    )
    exists_MD = (rows < num_queries)[:, None]
    if HEAD_WIDTH < D:
        exists_MD = exists_MD & (cols < HEAD_WIDTH)[None, :]
    o_MD = gl.load(
        head_of_o + ((rows - row) * o_strides[2])[:, None] + cols[None, :],
        mask=exists_MD,
        other=0.0,
    )
    mbarrier.wait(q_ready.index(INDEX), 0)
    q_MD, do_MD = _rows(q_tiles.index(INDEX)), _rows(do_tiles.index(INDEX))
    delta_M = gl.sum(o_MD.to(gl.float32) * do_MD.load(D_LAYOUT).to(gl.float32), 1)
    delta_M = gl.convert_layout(delta_M, gl.SliceLayout(1, S_LAYOUT))
    gl.store(delta + own_rows + rows_M, delta_M, mask=exists_M)
    # Whole tiles need no mask: every key of theirs exists and is seen by the first row.
    whole = num_keys // BLOCK
    if IS_CAUSAL:
        whole = gl.minimum(whole, (row + 1) // BLOCK)
    dq_MD = gl.zeros([ROWS, D], gl.float32, D_LAYOUT)
    slot, phase = 0, 0
    dq_MD, slot, phase = _dq_steps(
        dq_MD, q_MD, do_MD, lse2_M, delta_M, rings, 0, whole, slot, phase, rows_M, num_keys, scale_log2, False,
        IS_CAUSAL, S_LAYOUT, P_LAYOUT)  # fmt: skip
    dq_MD, slot, phase = _dq_steps(
        dq_MD, q_MD, do_MD, lse2_M, delta_M, rings, whole, num_steps, slot, phase, rows_M, num_keys, scale_log2, True,
        IS_CAUSAL, S_LAYOUT, P_LAYOUT)  # fmt: skip
    # The rows of q are not read again: what they become goes out through their place.
    q_MD.store((dq_MD * scale).to(k_tiles.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq, [b, h, row, 0], q_tiles.index(INDEX))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_heads",
        "group",
        "num_queries",
        "num_keys",
        "num_tiles",
        "all_heads",
        "section",
    ],
)
def dq_kernel(
    q, k, v, do,  # descriptors of boxes (1, 1, ROWS, D) for q and do, (1, 1, BLOCK, D) for k and v
    o, lse, delta,
    dq,  # a descriptor of boxes (1, 1, ROWS, D)
    o_b, o_h, o_t, num_heads, group, num_queries, num_keys, num_tiles, all_heads, section, scale_log2, scale,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr, HEAD_WIDTH: gl.constexpr,
):  # fmt: skip
    """dq = scale (P * (do v^T - delta)) k and delta = rowsum(o * do), for one tile of TILE_ROWS
    queries.
    """
    rings = (
        _tiles(q, CONSUMERS), _tiles(do, CONSUMERS), _barriers(CONSUMERS, 1), _tiles(k, STAGES), _tiles(v, STAGES),
        _barriers(STAGES, 1), _barriers(STAGES, CONSUMERS),
    )  # fmt: skip
    number = _number(all_heads, num_tiles, section, IS_CAUSAL)
    sizes = (num_heads, num_queries, num_keys, num_tiles)
    work = (o, (o_b, o_h, o_t), lse, delta, dq, rings, number, sizes, scale_log2, scale)
    gl.warp_specialize([
        (_consume_dq, (work, 0, IS_CAUSAL, HEAD_WIDTH)),
        (_consume_dq, (work, 1, IS_CAUSAL, HEAD_WIDTH)),
        (_produce_dq, ((q, k, v, do), rings, number, sizes, group, IS_CAUSAL)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# ---- dk and dv -----------------------------------------------------------------------------------------------------


@gluon.jit
def _place_keys(number, sizes, IS_CAUSAL: gl.constexpr):
    """(batch, key head, first key, first query tile, how many of a head need a mask, how many of it
    need none).
    """
    num_kv_heads, num_queries, _, num_tiles = sizes
    tile, head = number % num_tiles, number // num_tiles
    col = tile * TILE_ROWS
    stop = gl.cdiv(num_queries, BLOCK)
    first, masked = 0, 0
    # at least one tile, also where no query sees these keys: masked, it makes the zeros
    if IS_CAUSAL:
        first = gl.minimum(col // BLOCK, stop - 1)
        masked = gl.minimum(gl.cdiv(col + TILE_ROWS, BLOCK), stop) - first
    return head // num_kv_heads, head % num_kv_heads, col, first, masked, stop - first - masked


@gluon.jit
def _query_tile(step, first, masked, whole, group):
    """(query head of the group, query tile) of a step: all masked tiles of the group's heads come
    first.
    """
    unmasked = step - masked * group
    is_masked = unmasked < 0
    length = gl.maximum(gl.where(is_masked, masked, whole), 1)
    rest = gl.where(is_masked, step, unmasked)
    return rest // length, first + gl.where(is_masked, 0, masked) + rest % length


@gluon.jit
def _produce_dkdv(inputs, numbers, rings, sizes, group, turns, IS_CAUSAL: gl.constexpr):
    """Copies tiles, and beside those of queries their log-sum-exp, to base 2 and infinite past the
    end, and delta.
    """
    q, k, v, do = inputs
    lse, delta = numbers
    k_tiles, v_tiles, kv_ready, kv_free, q_tiles, do_tiles, lse_tiles, delta_tiles, ready, free = (
        rings
    )
    num_kv_heads, num_queries = sizes[0], sizes[1]
    STAGES: gl.constexpr = q_tiles.shape[0]
    WARP: gl.constexpr = gl.BlockedLayout([BLOCK // 32], [32], [1], [0])
    slot, phase, kv_slot, kv_phase = 0, 1, 0, 1
    own, rounds = _own_turns(turns)
    number = gl.load(own)
    for round_ in range(rounds):
        b, kv_h, col, first, masked, whole = _place_keys(number, sizes, IS_CAUSAL)
        number = gl.load(own + round_ + 1)  # early, and one more than there are
        num_steps = (masked + whole) * group
        for step in range(num_steps):
            in_group, tile = _query_tile(step, first, masked, whole, group)
            h = kv_h * group + in_group
            rows_M = tile * BLOCK + gl.arange(0, BLOCK, WARP)
            exists_M = rows_M < num_queries
            own_rows = (b * num_kv_heads * group + h).to(gl.int64) * num_queries
            lse2_M = gl.load(lse + own_rows + rows_M, mask=exists_M, other=float("inf")) * LOG2_E
            delta_M = gl.load(delta + own_rows + rows_M, mask=exists_M, other=0.0)
            mbarrier.wait(free.index(slot), phase)
            _copy_pair(
                q,
                do,
                b,
                h,
                tile * BLOCK,
                ready.index(slot),
                q_tiles.index(slot),
                do_tiles.index(slot),
            )
            lse_tiles.index(slot).store(lse2_M)
            delta_tiles.index(slot).store(delta_M)
            mbarrier.arrive(ready.index(slot))
            # Queries go ahead as far as the ring is long: keys wait for the end of the tile before.
            if step == gl.minimum(STAGES, num_steps) - 1:
                for consumer in gl.static_range(CONSUMERS):
                    place = consumer * KV_STAGES + kv_slot
                    mbarrier.wait(kv_free.index(place), kv_phase)
                    _copy_pair(k, v, b, kv_h, col + consumer * ROWS, kv_ready.index(place), k_tiles.index(place),
                               v_tiles.index(place))  # fmt: skip
            slot, phase = _advance(slot, phase, STAGES)
        kv_slot, kv_phase = _advance(kv_slot, kv_phase, KV_STAGES)


@gluon.jit
def _dkdv_steps(
    dk_ND, dv_ND, k_ND, v_ND, rings, start, stop, first, per_head, slot, phase, cols_N, scale_log2,
    MASK: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Steps start .. stop: the exponentials run beside dP's product, dS beside dV's."""
    _, _, _, _, q_tiles, do_tiles, lse_tiles, delta_tiles, ready, free = rings
    STAGES: gl.constexpr = q_tiles.shape[0]
    for step in range(start, stop):
        mbarrier.wait(ready.index(slot), phase)
        s_NM = _issue_scores(k_ND, q_tiles.index(slot), S_LAYOUT)
        dp_NM = _issue_scores(v_ND, do_tiles.index(slot), S_LAYOUT)
        lse2_M = lse_tiles.index(slot).load(gl.SliceLayout(0, S_LAYOUT))
        s_NM = warpgroup_mma_wait(1, deps=(s_NM,))
        # here, or the masked loop has 66 instructions more
        row = (first + (step - start) % per_head) * BLOCK
        p_NM = gl.exp2(s_NM * scale_log2 - lse2_M[None, :])
        if MASK:
            rows_M = row + gl.arange(0, BLOCK, gl.SliceLayout(0, S_LAYOUT))
            p_NM = gl.where(rows_M[None, :] >= cols_N[:, None], p_NM, 0.0)
        p = gl.convert_layout(_round(p_NM, q_tiles.dtype), P_LAYOUT)
        # Known to be ready: this only ends the basic block. Within one, ptxas moves the
        # exponentials behind the wait.
        mbarrier.wait(ready.index(slot), phase)
        dv_ND = _issue_output(p, do_tiles.index(slot), dv_ND)
        dp_NM = warpgroup_mma_wait(1, deps=(dp_NM,))
        delta_M = delta_tiles.index(slot).load(gl.SliceLayout(0, S_LAYOUT))
        ds = gl.convert_layout(_round(p_NM * (dp_NM - delta_M[None, :]), q_tiles.dtype), P_LAYOUT)
        dk_ND = _issue_output(ds, q_tiles.index(slot), dk_ND)
        dk_ND, dv_ND = warpgroup_mma_wait(0, deps=(dk_ND, dv_ND))
        mbarrier.arrive(free.index(slot))
        slot, phase = _advance(slot, phase, STAGES)
    return dk_ND, dv_ND, slot, phase


@gluon.jit
def _consume_dkdv(work, INDEX: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Consumer INDEX: dk and dv of its 64 rows of every tile of keys that this program has."""
    dk, dv, rings, sizes, group, turns, scale_log2, scale = work
    k_tiles, v_tiles, kv_ready, kv_free, q_tiles, _, _, _, _, _ = rings
    D: gl.constexpr = q_tiles.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    slot, phase, kv_slot, kv_phase = 0, 0, 0, 0
    own, rounds = _own_turns(turns)
    number = gl.load(own)
    for round_ in range(rounds):
        b, kv_h, col, first, masked, whole = _place_keys(number, sizes, IS_CAUSAL)
        number = gl.load(own + round_ + 1)  # early, and one more than there are
        col += INDEX * ROWS
        cols_N = col + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        place = INDEX * KV_STAGES + kv_slot
        mbarrier.wait(kv_ready.index(place), kv_phase)
        k_ND, v_ND = _rows(k_tiles.index(place)), _rows(v_tiles.index(place))
        dk_ND = gl.zeros([ROWS, D], gl.float32, D_LAYOUT)
        dv_ND = gl.zeros([ROWS, D], gl.float32, D_LAYOUT)
        if IS_CAUSAL:
            dk_ND, dv_ND, slot, phase = _dkdv_steps(
                dk_ND, dv_ND, k_ND, v_ND, rings, 0, masked * group, first, masked, slot, phase, cols_N, scale_log2,
                True, S_LAYOUT, P_LAYOUT)  # fmt: skip
        dk_ND, dv_ND, slot, phase = _dkdv_steps(
            dk_ND, dv_ND, k_ND, v_ND, rings, masked * group, (masked + whole) * group, first, whole, slot, phase,
            cols_N, scale_log2, False, S_LAYOUT, P_LAYOUT)  # fmt: skip
        # The keys and values are not read again: their gradients go out through their place.
        v_ND.store(dv_ND.to(q_tiles.dtype))
        k_ND.store((dk_ND * scale).to(q_tiles.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv, [b, kv_h, col, 0], v_tiles.index(place))
        tma.async_copy_shared_to_global(dk, [b, kv_h, col, 0], k_tiles.index(place))
        tma.store_wait(0)
        mbarrier.arrive(kv_free.index(place))
        kv_slot, kv_phase = _advance(kv_slot, kv_phase, KV_STAGES)


@gluon.jit(
    do_not_specialize=["num_kv_heads", "group", "num_queries", "num_keys", "num_tiles"],
)
def dkdv_kernel(
    q, k, v, do,  # descriptors of boxes (1, 1, BLOCK, D) for q and do, (1, 1, ROWS, D) for k and v
    lse, delta,
    dk, dv,  # descriptors of boxes (1, 1, ROWS, D)
    unused,  # what the portable kernel adds dq into when it makes that as well
    turns, num_kv_heads, group, num_queries, num_keys, num_tiles, scale_log2, scale,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dv = P^T do and dk = scale (P * (do v^T - delta))^T q, for the tiles of TILE_ROWS keys that
    `turns` deals out.
    """
    numbers: gl.constexpr = [STAGES, BLOCK]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rings = (
        _tiles(k, CONSUMERS * KV_STAGES), _tiles(v, CONSUMERS * KV_STAGES), _barriers(CONSUMERS * KV_STAGES, 1),
        _barriers(CONSUMERS * KV_STAGES, 1), _tiles(q, STAGES), _tiles(do, STAGES),
        gl.allocate_shared_memory(gl.float32, numbers, plain), gl.allocate_shared_memory(gl.float32, numbers, plain),
        _barriers(STAGES, 2), _barriers(STAGES, CONSUMERS),
    )  # fmt: skip
    sizes = (num_kv_heads, num_queries, num_keys, num_tiles)
    work = (dk, dv, rings, sizes, group, turns, scale_log2, scale)
    gl.warp_specialize([
        (_consume_dkdv, (work, 0, IS_CAUSAL)),
        (_consume_dkdv, (work, 1, IS_CAUSAL)),
        (_produce_dkdv, ((q, k, v, do), (lse, delta), rings, sizes, group, turns, IS_CAUSAL)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# ---- host side -----------------------------------------------------------------------------------------------------


def takes_dq(case, dq):
    return _takes(case, case.q, DQ_STAGES, dq)


def takes_dkdv(case, dk, dv):
    return _takes(case, case.k, DKDV_STAGES, dk, dv)


def _takes(case, owned, widths, *outs):
    return (
        tile_width(case) in widths
        and can_run(case, case.q, case.k, case.v, case.do, *outs)
        and fills_chip(case, owned)
    )


def dq_launch(case, dq):
    """The launch on q, k, v, do, o, lse, delta and dq."""
    heads = math.prod(case.q.shape[:2])
    section = case.section(
        case.k.shape[2], num_heads=heads, num_tiles=triton.cdiv(case.q.shape[2], TILE_ROWS.value)
    )
    return launch_of(
        dq_kernel, case, owned=case.q, strides=case.o.steps,
        boxes=((0, case.q, ROWS), (1, case.k, BLOCK), (2, case.v, BLOCK), (3, case.do, ROWS), (7, dq, ROWS)),
        scalars=(heads, section, *_scales(case)),
        constants={"STAGES": DQ_STAGES[tile_width(case)], "HEAD_WIDTH": case.q.shape[3]},
    )  # fmt: skip


def dkdv_launch(case, dk, dv):
    """The launch on q, k, v, do, lse, delta, dk, dv and one more tensor, which it leaves alone."""
    steps = [tiles * case.group for tiles in _query_tiles_seen(case)]
    return launch_of(
        dkdv_kernel, case, owned=case.k, deal=deal_of(case, case.k, steps, loop_length=case.q.shape[2] * case.group),
        boxes=((0, case.q, BLOCK), (1, case.k, ROWS), (2, case.v, ROWS), (3, case.do, BLOCK), (6, dk, ROWS),
               (7, dv, ROWS)),
        scalars=_scales(case), constants={"STAGES": DKDV_STAGES[tile_width(case)]},
    )  # fmt: skip


def _query_tiles_seen(case):
    """How many tiles of queries each tile of keys is seen by, at least one: `_place_keys` on the
    host.
    """
    stop = triton.cdiv(case.q.shape[2], BLOCK.value)
    begins = range(0, case.k.shape[2], TILE_ROWS.value)
    return [
        stop - min(begin // BLOCK.value, stop - 1) if case.is_causal else stop for begin in begins
    ]


def _scales(case):
    return case.scale * math.log2(math.e), case.scale
