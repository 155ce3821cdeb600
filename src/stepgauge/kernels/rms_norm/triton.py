"""RMSNorm's Triton kernels and their launch configurations.

Shape suffixes: R rows of one tile, D a block of the row's width, P programs.

Everything is computed in float32. A row of up to 16,384 elements is held in registers and read
once; wider rows are processed in blocks. docs/log/2026-11-21-rms_norm.md has the derivation, the
lower bound in bytes and a log of experiments.
"""

from dataclasses import dataclass, replace

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, num_rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y = w * x / sqrt(mean(x^2) + eps) for ROWS rows, each held in registers."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col_D = tl.arange(0, BLOCK)
    in_row_D = col_D < WIDTH
    # int64 only for the row's start: num_rows * WIDTH may exceed 2^31, a column index cannot.
    offset_RD = (row_R * WIDTH)[:, None] + col_D[None, :]
    mask_RD = (row_R < num_rows)[:, None] & in_row_D[None, :]
    x_RD = tl.load(x_ptr + offset_RD, mask=mask_RD, other=0.0).to(tl.float32)
    weight_D = tl.load(weight_ptr + col_D, mask=in_row_D, other=0.0).to(tl.float32)
    rstd_R = tl.rsqrt(tl.sum(x_RD * x_RD, axis=1) / WIDTH + eps)
    tl.store(rstd_ptr + row_R, rstd_R, mask=row_R < num_rows)
    y_RD = x_RD * rstd_R[:, None] * weight_D[None, :]
    tl.store(y_ptr + offset_RD, y_RD.to(y_ptr.dtype.element_ty), mask=mask_RD)


@triton.jit(do_not_specialize=["num_rows"])
def forward_wide_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, num_rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for one row that does not fit in registers; its second read comes from L2."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * WIDTH
    y_ptr += row * WIDTH
    square_D = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        col_D = start + tl.arange(0, BLOCK)
        mask_D = col_D < WIDTH
        x_D = tl.load(x_ptr + col_D, mask=mask_D, other=0.0).to(tl.float32)
        square_D += x_D * x_D
    rstd = tl.rsqrt(tl.sum(square_D) / WIDTH + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, WIDTH, BLOCK):
        col_D = start + tl.arange(0, BLOCK)
        mask_D = col_D < WIDTH
        x_D = tl.load(x_ptr + col_D, mask=mask_D, other=0.0).to(tl.float32)
        weight_D = tl.load(weight_ptr + col_D, mask=mask_D, other=0.0).to(tl.float32)
        tl.store(y_ptr + col_D, (x_D * rstd * weight_D).to(y_ptr.dtype.element_ty), mask=mask_D)


@triton.jit(do_not_specialize=["num_rows"])
def backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr,
    KEEP_WEIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both gradients in one pass: dx one tile of rows at a time, dw summed in registers over tiles.

    FOLD: the rows of a tile are in the same thread, so that they can be summed at once without
    exchange between threads; otherwise the sum keeps the tile's shape until the end.
    """
    pid = tl.program_id(0)
    col_D = tl.arange(0, BLOCK)
    in_row_D = col_D < WIDTH
    if KEEP_WEIGHT:
        weight_D = tl.load(weight_ptr + col_D, mask=in_row_D, other=0.0).to(tl.float32)
    if FOLD:
        dw_XD = tl.zeros([1, BLOCK], tl.float32)
    else:
        dw_XD = tl.zeros([ROWS, BLOCK], tl.float32)
    num_tiles = tl.cdiv(num_rows, ROWS)
    for tile in tl.range(pid, num_tiles, tl.num_programs(0), num_stages=STAGES):
        # A row index times WIDTH may exceed 2^31.
        row_R = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        offset_RD = (row_R * WIDTH)[:, None] + col_D[None, :]
        mask_RD = (row_R < num_rows)[:, None] & in_row_D[None, :]
        dy_RD = tl.load(dy_ptr + offset_RD, mask=mask_RD, other=0.0).to(tl.float32)
        x_RD = tl.load(x_ptr + offset_RD, mask=mask_RD, other=0.0).to(tl.float32)
        rstd_R = tl.load(rstd_ptr + row_R, mask=row_R < num_rows, other=0.0)
        xhat_RD = x_RD * rstd_R[:, None]
        if FOLD:
            dw_XD += tl.sum(dy_RD * xhat_RD, axis=0)[None, :]
        else:
            dw_XD += dy_RD * xhat_RD
        if not KEEP_WEIGHT:
            weight_D = tl.load(weight_ptr + col_D, mask=in_row_D, other=0.0).to(tl.float32)
        g_RD = dy_RD * weight_D[None, :]
        mean_R = tl.sum(g_RD * xhat_RD, axis=1) / WIDTH
        dx_RD = (g_RD - xhat_RD * mean_R[:, None]) * rstd_R[:, None]
        dx_RD = dx_RD.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offset_RD, dx_RD, mask=mask_RD)
    dw_D = tl.sum(dw_XD, axis=0)
    tl.store(partial_ptr + pid.to(tl.int64) * WIDTH + col_D, dw_D, mask=in_row_D)


@triton.jit(do_not_specialize=["num_rows"])
def backward_wide_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Both gradients of rows too wide for registers; program (p, s) owns BLOCKS blocks of columns.

    Each program computes the row's inner product over all columns, and then reads its own columns
    again from L1 or L2. Programs with the same p process the same rows at the same time, so device
    memory is read about once, and the sum for dw stays in registers.
    """
    pid = tl.program_id(0)
    first_col = tl.program_id(1) * (BLOCK * BLOCKS)
    dw = ()
    for _ in tl.static_range(BLOCKS):
        dw = dw + (tl.zeros([BLOCK], tl.float32),)  # noqa: RUF005  (Triton has no unpacking)
    for row in range(pid, num_rows, tl.num_programs(0)):
        row_start = tl.cast(row, tl.int64) * WIDTH
        rstd = tl.load(rstd_ptr + row)
        product_D = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            col_D = start + tl.arange(0, BLOCK)
            mask_D = col_D < WIDTH
            dy_D = tl.load(dy_ptr + row_start + col_D, mask=mask_D, other=0.0).to(tl.float32)
            x_D = tl.load(x_ptr + row_start + col_D, mask=mask_D, other=0.0).to(tl.float32)
            weight_D = tl.load(weight_ptr + col_D, mask=mask_D, other=0.0).to(tl.float32)
            product_D += dy_D * weight_D * x_D
        mean = tl.sum(product_D) * rstd / WIDTH
        dw_next = ()
        for b in tl.static_range(BLOCKS):
            col_D = first_col + b * BLOCK + tl.arange(0, BLOCK)
            mask_D = col_D < WIDTH
            dy_D = tl.load(dy_ptr + row_start + col_D, mask=mask_D, other=0.0).to(tl.float32)
            x_D = tl.load(x_ptr + row_start + col_D, mask=mask_D, other=0.0).to(tl.float32)
            weight_D = tl.load(weight_ptr + col_D, mask=mask_D, other=0.0).to(tl.float32)
            xhat_D = x_D * rstd
            dw_next = dw_next + (dw[b] + dy_D * xhat_D,)  # noqa: RUF005
            dx_D = (dy_D * weight_D - xhat_D * mean) * rstd
            dx_ptrs = dx_ptr + row_start + col_D
            tl.store(dx_ptrs, dx_D.to(dx_ptr.dtype.element_ty), mask=mask_D)
        dw = dw_next
    for b in tl.static_range(BLOCKS):
        col_D = first_col + b * BLOCK + tl.arange(0, BLOCK)
        tl.store(partial_ptr + pid.to(tl.int64) * WIDTH + col_D, dw[b], mask=col_D < WIDTH)


@triton.jit(do_not_specialize=["num_programs"])
def reduce_kernel(
    partial_ptr, dw_ptr, num_programs,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """dw = sum of the programs' partial sums, in a fixed order."""
    col_D = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_row_D = col_D < WIDTH
    total_PD = tl.zeros([BLOCK_P, BLOCK], tl.float32)
    for start in range(0, num_programs, BLOCK_P):
        program_P = start + tl.arange(0, BLOCK_P)
        mask_PD = (program_P < num_programs)[:, None] & in_row_D[None, :]
        offset_PD = program_P.to(tl.int64)[:, None] * WIDTH + col_D[None, :]
        total_PD += tl.load(partial_ptr + offset_PD, mask=mask_PD, other=0.0)
    tl.store(dw_ptr + col_D, tl.sum(total_PD, axis=0).to(dw_ptr.dtype.element_ty), mask=in_row_D)


@dataclass(frozen=True)
class ForwardConfig:
    """Shape of a forward launch; `wide` rows are processed in blocks instead of held in
    registers.
    """

    block: int
    rows: int
    num_warps: int
    wide: bool = False


@dataclass(frozen=True)
class BackwardConfig:
    """Shape of a backward launch.

    blocks > 0 selects the wide kernel, with that many column blocks per program; otherwise `rows`
    rows at a time are held in registers, with `stages` tiles in flight.
    """

    block: int
    rows: int
    num_warps: int
    stages: int = 1
    programs_per_sm: int = 2
    keep_weight: bool = True
    blocks: int = 0

    def fold(self, itemsize: int) -> bool:
        """Returns True if a thread has all rows of its columns: that is, if there are at most as
        many threads as 16-byte loads in a row.
        """
        return self.num_warps * 32 * (16 // itemsize) <= self.block

    def fitted(self, itemsize: int, *, shared_bytes: int) -> "BackwardConfig":
        """Returns the configuration with at most as many tiles in flight as shared memory can
        hold.
        """
        tensors = 2 + (not self.keep_weight)
        tile_bytes = tensors * self.rows * self.block * itemsize
        # The current tile is in registers. 2 KiB are reserved for sums between warps.
        in_flight = max(0, shared_bytes - 2048) // tile_bytes
        return replace(self, stages=max(1, min(self.stages, 1 + in_flight)))


# By (width, bytes per element): the best of a sweep with 50,000 rows (16,384 rows for width
# 16,384), 2026-11-21, benchmarks/kernels/sweep.py. Compared with the rules below, forward is 0.3 to
# 1.4 % and backward 1.2 to 4 % faster on an H100; those marked H200 are 2 to 10 % faster there, and
# 40 % at width 8192 in 16 bits.
_TUNED_FORWARD = {
    (1024, 2): ForwardConfig(block=1024, rows=2, num_warps=8),
    (1024, 4): ForwardConfig(block=1024, rows=8, num_warps=4),
    (4096, 2): ForwardConfig(block=4096, rows=2, num_warps=16),
    (4096, 4): ForwardConfig(block=4096, rows=2, num_warps=16),
}
_TUNED_BACKWARD = {
    (1024, 2): BackwardConfig(1024, rows=2, num_warps=4, stages=4, programs_per_sm=2),
    (1024, 4): BackwardConfig(1024, rows=2, num_warps=4, stages=4, programs_per_sm=1),
    (2048, 2): BackwardConfig(2048, rows=2, num_warps=8, stages=4, programs_per_sm=2),  # H200
    (2048, 4): BackwardConfig(2048, rows=1, num_warps=4, stages=4, programs_per_sm=1),
    (4096, 2): BackwardConfig(4096, rows=1, num_warps=16, stages=4, programs_per_sm=1),
    (4096, 4): BackwardConfig(
        4096, rows=1, num_warps=4, stages=4, programs_per_sm=1, keep_weight=False
    ),
    (8192, 2): BackwardConfig(8192, rows=1, num_warps=16, stages=3, programs_per_sm=1),  # H200
    (8192, 4): BackwardConfig(8192, rows=1, num_warps=16, stages=1, programs_per_sm=1),  # H200
    # H200
    (16384, 2): BackwardConfig(
        16384, rows=1, num_warps=16, stages=1, programs_per_sm=1, keep_weight=False
    ),
}


def forward_config(width: int, itemsize: int) -> ForwardConfig:
    if (width, itemsize) in _TUNED_FORWARD:
        return _TUNED_FORWARD[width, itemsize]
    block = triton.next_power_of_2(width)
    if block * itemsize > 65536:
        return ForwardConfig(block=8192, rows=1, num_warps=16, wide=True)
    # About 32 bytes of a row per thread: two 16-byte loads in flight.
    rows = max(1, 4096 // (block * itemsize))
    num_warps = min(16, max(4, rows * block * itemsize // 1024))
    return ForwardConfig(block=block, rows=rows, num_warps=num_warps)


def backward_config(width: int, itemsize: int) -> BackwardConfig:
    if (width, itemsize) in _TUNED_BACKWARD:
        return _TUNED_BACKWARD[width, itemsize]
    block = triton.next_power_of_2(width)
    if block > 16384 and width % 4096:
        # Masks need registers, so a program gets half as many columns.
        return BackwardConfig(block=2048, rows=1, num_warps=8, programs_per_sm=1, blocks=4)
    if block > 16384:
        return BackwardConfig(block=4096, rows=1, num_warps=16, programs_per_sm=1, blocks=4)
    if block == 16384:
        # Spills registers unless the weight is loaded again for each row; asynchronous copies hide
        # these loads.
        return BackwardConfig(block, 1, 16, stages=2, programs_per_sm=1, keep_weight=False)
    if block == 8192:
        return BackwardConfig(block, 1, 16 if itemsize == 4 else 8, stages=2, programs_per_sm=1)
    rows = max(1, 2048 // block)
    return BackwardConfig(block, rows, num_warps=8 if block >= 4096 else 4, stages=3)


REDUCE_BLOCK, REDUCE_BLOCK_P, REDUCE_WARPS = 32, 32, 4
