"""dk and dv of the attention backward in Gluon for sm_90: one warp copies, two groups of four
multiply.

It is hopper_dq.py with queries and keys exchanged: each consumer owns 64 keys and loops over the
queries. Scores are transposed, so that the probabilities are in the registers that the next product
reads. In each step, the exponentials overlap with the product for dP, and dS with the product for
dV. The kernel computes the same as `dkdv_kernel` of backward.py, without atomics and bitwise
reproducibly. It is persistent.

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

from .hopper_dq import BLOCK
from .hopper_ops import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    TILE_ROWS,
    _advance,
    _barriers,
    _copy_pair,
    _issue_output,
    _issue_scores,
    _own_tiles,
    _round,
    _rows,
    _tiles,
)

DKDV_STAGES = {64: 4, 128: 2}  # tiles in the ring of q and do, by head width
# tiles of keys and values in each consumer's ring, so that the next tile's are copied early
KV_STAGES = gl.constexpr(2)


@gluon.jit
def _place_keys(number, sizes, IS_CAUSAL: gl.constexpr):
    """Returns (batch, key head, first key, first query tile, number of a head's query tiles that
    need a mask, number that need none).
    """
    num_kv_heads, num_queries, _, num_tiles = sizes
    tile, head = number % num_tiles, number // num_tiles
    col = tile * TILE_ROWS
    stop = gl.cdiv(num_queries, BLOCK)
    first, masked = 0, 0
    # at least one tile: if no query sees these keys, it is fully masked and produces the zeros
    if IS_CAUSAL:
        first = gl.minimum(col // BLOCK, stop - 1)
        masked = gl.minimum(gl.cdiv(col + TILE_ROWS, BLOCK), stop) - first
    return head // num_kv_heads, head % num_kv_heads, col, first, masked, stop - first - masked


@gluon.jit
def _query_tile(step, first, masked, whole, group):
    """Returns (query head in the group, query tile) of a step. The masked tiles of all heads in the
    group come first.
    """
    unmasked = step - masked * group
    is_masked = unmasked < 0
    length = gl.maximum(gl.where(is_masked, masked, whole), 1)
    rest = gl.where(is_masked, step, unmasked)
    return rest // length, first + gl.where(is_masked, 0, masked) + rest % length


@gluon.jit
def _produce_dkdv(inputs, numbers, rings, sizes, group, schedule, IS_CAUSAL: gl.constexpr):
    """Copies tiles of all four inputs, and for each tile of queries their log-sum-exp (to base 2,
    and infinite past the end) and delta.
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
    own, rounds = _own_tiles(schedule)
    number = gl.load(own)
    for round_ in range(rounds):
        b, kv_h, col, first, masked, whole = _place_keys(number, sizes, IS_CAUSAL)
        number = gl.load(own + round_ + 1)  # loaded early; the last one is the schedule's padding
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
            # Queries are copied first, as far as their ring is long, because the keys must wait for
            # the end of the previous tile.
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
    """Runs steps start .. stop. The exponentials overlap with dP's product, dS with dV's."""
    _, _, _, _, q_tiles, do_tiles, lse_tiles, delta_tiles, ready, free = rings
    STAGES: gl.constexpr = q_tiles.shape[0]
    for step in range(start, stop):
        mbarrier.wait(ready.index(slot), phase)
        s_NM = _issue_scores(k_ND, q_tiles.index(slot), S_LAYOUT)
        dp_NM = _issue_scores(v_ND, do_tiles.index(slot), S_LAYOUT)
        lse2_M = lse_tiles.index(slot).load(gl.SliceLayout(0, S_LAYOUT))
        s_NM = warpgroup_mma_wait(1, deps=(s_NM,))
        # computed here, because elsewhere it adds 66 instructions to the masked loop
        row = (first + (step - start) % per_head) * BLOCK
        p_NM = gl.exp2(s_NM * scale_log2 - lse2_M[None, :])
        if MASK:
            rows_M = row + gl.arange(0, BLOCK, gl.SliceLayout(0, S_LAYOUT))
            p_NM = gl.where(rows_M[None, :] >= cols_N[:, None], p_NM, 0.0)
        p = gl.convert_layout(_round(p_NM, q_tiles.dtype), P_LAYOUT)
        # This barrier is already complete; waiting only ends the basic block. Within one block,
        # ptxas moves the exponentials after the wait.
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
    """Computes dk and dv for consumer INDEX's 64 rows of every tile of keys of this program."""
    dk, dv, rings, sizes, group, schedule, scale_log2, scale = work
    k_tiles, v_tiles, kv_ready, kv_free, q_tiles, _, _, _, _, _ = rings
    D: gl.constexpr = q_tiles.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    slot, phase, kv_slot, kv_phase = 0, 0, 0, 0
    own, rounds = _own_tiles(schedule)
    number = gl.load(own)
    for round_ in range(rounds):
        b, kv_h, col, first, masked, whole = _place_keys(number, sizes, IS_CAUSAL)
        number = gl.load(own + round_ + 1)  # loaded early; the last one is the schedule's padding
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
        # The keys and values are not read again, so their memory holds dk and dv on their way out.
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
    schedule, num_kv_heads, group, num_queries, num_keys, num_tiles, scale_log2, scale,
    IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes dv = P^T do and dk = scale (P * (do v^T - delta))^T q for the tiles of TILE_ROWS
    keys that `schedule` gives each program.
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
    work = (dk, dv, rings, sizes, group, schedule, scale_log2, scale)
    gl.warp_specialize([
        (_consume_dkdv, (work, 0, IS_CAUSAL)),
        (_consume_dkdv, (work, 1, IS_CAUSAL)),
        (_produce_dkdv, ((q, k, v, do), (lse, delta), rings, sizes, group, schedule, IS_CAUSAL)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
