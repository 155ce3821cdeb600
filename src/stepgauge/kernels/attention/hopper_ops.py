"""Sizes and functions that attention's Gluon kernels share: copies, ring buffers and a tile's
products.

A ring is (tiles, barriers for "ready to be read", barriers for "free to be filled").
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # the rows of a wgmma, and therefore of a consumer
TILE_ROWS = gl.constexpr(CONSUMERS.value * ROWS.value)
# Registers per thread at launch, then per thread of a consumer and of the producer; a program has
# 64 Ki in total.
REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 168, gl.constexpr(240), gl.constexpr(24)
LN_2 = gl.constexpr(math.log(2.0))
LOG2_E = gl.constexpr(math.log2(math.e))


@gluon.jit
def _own_tiles(schedule):
    """Returns (pointer to this program's tiles in the tensor of `_make_schedule`, their number)."""
    first = gl.load(schedule + gl.program_id(0))
    return schedule + first, gl.load(schedule + gl.program_id(0) + 1) - first


@gluon.jit
def _place(number, sizes, IS_CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns (batch, head, first row, number of key tiles) for the number of a tile of queries."""
    num_heads, _, num_keys, num_tiles = sizes
    tile, head = number % num_tiles, number // num_tiles
    last = num_keys
    if IS_CAUSAL:
        last = gl.minimum(last, (tile + 1) * TILE_ROWS)
    return head // num_heads, head % num_heads, tile * TILE_ROWS, gl.cdiv(last, BLOCK_N)


@gluon.jit
def _advance(slot, phase, STAGES: gl.constexpr):
    """Returns the next slot of a ring, and the phase of its barriers."""
    at_end = slot == STAGES - 1
    return gl.where(at_end, 0, slot + 1), gl.where(at_end, phase ^ 1, phase)


@gluon.jit
def _copy(x, b, h, row, ready, tile):
    mbarrier.expect(ready, x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [b, h, row, 0], ready, tile)


@gluon.jit
def _round(p_MN, DTYPE: gl.constexpr):
    """Rounds to DTYPE, two numbers per instruction. Inline assembly, because LLVM would otherwise
    postpone the rounding and keep float32 values in registers.
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
    """Reshapes a copied tile to (rows, head width)."""
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
    """Copies one tile of each of two tensors; one barrier signals both."""
    mbarrier.expect(ready, first.block_type.nbytes + second.block_type.nbytes)
    tma.async_copy_global_to_shared(first, [b, h, row, 0], ready, first_tile)
    tma.async_copy_global_to_shared(second, [b, h, row, 0], ready, second_tile)
