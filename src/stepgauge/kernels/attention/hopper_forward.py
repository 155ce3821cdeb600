"""The attention forward in Gluon for sm_90: one warp copies, two groups of four warps multiply.

Follows FlashAttention-3 (Shah et al. 2024). A producer warp fills rings of key and value tiles
through the copy engine. Each of two consumers owns 64 query rows, and computes exponentials while
the scores of the next tile and the product of this one run. The kernel is persistent: there is one
program per multiprocessor, which fetches its next tile while it finishes the current one. It
computes the same as `forward_kernel` of forward.py. docs/log/2026-11-21-attention.md explains the
design.

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
    LN_2,
    PRODUCER_REGISTERS,
    ROWS,
    _advance,
    _copy,
    _issue_output,
    _issue_scores,
    _own_tiles,
    _place,
    _round,
    _rows,
)

BLOCK_N = gl.constexpr(128)
Q_STAGES = gl.constexpr(2)  # tiles of queries in each consumer's ring
# tiles in the ring of keys and in that of values, by head width; shared memory limits them at 128
NUM_STAGES = {64: 3, 128: 2}


@gluon.jit
def _produce(inputs, rings, sizes, group, schedule, IS_CAUSAL: gl.constexpr):
    """Copies the consumers' tiles, as far ahead as the rings are long."""
    q, k, v = inputs
    q_ring, k_ring, v_ring = rings
    q_tiles, q_ready, q_free = q_ring
    k_tiles, k_ready, k_free = k_ring
    v_tiles, v_ready, v_free = v_ring
    STAGES: gl.constexpr = k_tiles.shape[0]
    # a new barrier counts as having completed phase 1, so every slot is free
    slot, phase, q_slot, q_phase = 0, 1, 0, 1
    own, rounds = _own_tiles(schedule)
    number = gl.load(own)
    for round_ in range(rounds):
        b, h, row, num_steps = _place(number, sizes, IS_CAUSAL, BLOCK_N)
        number = gl.load(own + round_ + 1)  # loaded early; the last one is the schedule's padding
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
    """Returns (p, maximum, total, factor for earlier sums) after one more tile of scores."""
    if MASK:
        cols_N = gl.arange(0, s_MN.shape[1], gl.SliceLayout(0, s_MN.type.layout))
        if IS_CAUSAL:
            seen_M = gl.minimum(rows_M + 1, num_keys) - col
            s_MN = gl.where(cols_N[None, :] < seen_M[:, None], s_MN, float("-inf"))
        else:
            s_MN = gl.where((cols_N < num_keys - col)[None, :], s_MN, float("-inf"))
    # One fused multiply-add per element. The maximum may be taken before scaling, because the scale
    # is positive.
    new_max_M = gl.maximum(max_M, gl.max(s_MN, 1) * scale_log2)
    p_MN = gl.exp2(s_MN * scale_log2 - new_max_M[:, None])
    shrink_M = gl.exp2(max_M - new_max_M)
    return p_MN, new_max_M, total_M * shrink_M + gl.sum(p_MN, 1), shrink_M


@gluon.jit
def _shrink(acc_MD, shrink_M, O_LAYOUT: gl.constexpr):
    return acc_MD * gl.convert_layout(shrink_M, gl.SliceLayout(1, O_LAYOUT))[:, None]


@gluon.jit
def _overlapped(
    p, acc_MD, max_M, total_M, q_MD, k_ring, v_ring, start, stop, k_slot, k_phase, v_slot, v_phase, rows_M, num_keys,
    scale_log2, MASK: gl.constexpr, IS_CAUSAL: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Runs steps start .. stop. Each issues its scores together with the product of the step
    before.
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
        # This barrier is already complete; waiting only ends the basic block. Within one block,
        # ptxas moves the exponentials after the wait for the product, and nothing overlaps.
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
    """Computes consumer INDEX's 64 rows of every tile of queries that the schedule gives this
    program.
    """
    o, lse, rings, sizes, schedule, scale_log2 = work
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
    own, rounds = _own_tiles(schedule)
    number = gl.load(own)
    for round_ in range(rounds):
        b, h, row, num_steps = _place(number, sizes, IS_CAUSAL, BLOCK_N)
        number = gl.load(own + round_ + 1)  # loaded early; the last one is the schedule's padding
        row += INDEX * ROWS
        rows_M = row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        # Whole tiles need no mask, because the first row sees all their keys.
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
        # The first tile's scores are computed before the loop. Each step then computes the scores
        # of its tile and the product of the previous one.
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
        # The rows of q are not read again, so their memory holds o on its way out.
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
    lse, schedule, num_heads, group, num_queries, num_keys, num_tiles, scale_log2,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes o and its log-sum-exp for the tiles of TILE_ROWS queries that `schedule` gives each
    program.
    """
    rings = (
        _ring(q, CONSUMERS * Q_STAGES, 1),
        _ring(k, STAGES, CONSUMERS),
        _ring(v, STAGES, CONSUMERS),
    )
    sizes = (num_heads, num_queries, num_keys, num_tiles)
    work = (o, lse, rings, sizes, schedule, scale_log2)
    gl.warp_specialize([
        (_consume, (work, 0, IS_CAUSAL)),
        (_consume, (work, 1, IS_CAUSAL)),
        (_produce, ((q, k, v), rings, sizes, group, schedule, IS_CAUSAL)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
