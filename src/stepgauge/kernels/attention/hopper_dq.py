"""dq of the attention backward in Gluon for sm_90: one warp copies, two groups of four multiply.

As in hopper_forward.py, each consumer owns 64 query rows and loops over keys, which come through a
ring that a producer warp fills. In each step, the exponentials overlap with the product for dP. The
kernel computes the same as `dq_kernel` of backward.py, without atomics and bitwise reproducibly.

Legend: B batch, H query heads, K key heads, T_q queries, T_k keys, M queries and N keys of a tile,
D head width of a tile. The tensors' head width may be smaller: the copy engine then reads zeros
beyond it and writes nothing there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .hopper_ops import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    _advance,
    _barriers,
    _copy_pair,
    _issue_output,
    _issue_scores,
    _place,
    _round,
    _rows,
    _tiles,
)

BLOCK = gl.constexpr(64)  # rows of a tile in the loop (keys for dq, queries for dk and dv)
# tiles in the ring of keys and values, by head width; at 64 the portable dq is faster
DQ_STAGES = {128: 3}


@gluon.jit
def _number(all_heads, num_tiles, section, IS_CAUSAL: gl.constexpr):
    """Returns the number of this program's tile. Programs are ordered by section of heads (which
    fit in L2 together), and within a section the longest tiles come first.
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
    slot, phase = 0, 1  # a new barrier counts as having completed phase 1, so every slot is free
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
    """Runs steps start .. stop. The exponentials overlap with the product for dP."""
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
        # This barrier is already complete; waiting only ends the basic block. Within one block,
        # ptxas moves the exponentials after the wait.
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
    """Computes dq and delta for consumer INDEX's 64 rows of this program's tile of queries."""
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
    # A query past the end gets an infinite log-sum-exp, so that its probabilities are zero without
    # another mask.
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
    # Whole tiles need no mask, because the first row sees all their keys.
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
    # The rows of q are not read again, so their memory holds dq on its way out.
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
    """Computes dq = scale (P * (do v^T - delta)) k and delta = rowsum(o * do) for one tile of
    TILE_ROWS queries.
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
