"""Triton kernels of linear + cross-entropy for the passes over a chunk of logits between two
matmuls.

Two kernels replace logits by their gradient in place:
  held      keeps a row of up to 16,384 columns in registers between its statistics and its
  gradient:
            one read, one write.
  streamed  processes a row of any length: two reads, one write. It also computes the loss without a
            gradient.

Legend: N tokens of the chunk, D model width, V vocabulary, P length of a row in memory (V rounded
up, see chunked.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgauge.kernels.launch import Launch

from .plain import Loss
from .tile_ops import _dot_rows, _finite, _loss_of, _sech2, _tanh, _target_logit

BLOCK_D = 1024
# P is a multiple of it (chunked.ROW_MULTIPLE). Kernels get P in these units, so that the compiler
# knows the alignment of rows.
ROW_UNIT = 64
# With 64 registers per thread, two programs of 512 threads share a multiprocessor, so that one
# reads while the other waits. Nothing spills.
HELD_REGISTERS = 64


@triton.jit(do_not_specialize=["V", "P_units", "D", "hidden_units", "weight_units"])
def streamed_gradient_kernel(
    logits_ptr, hidden_ptr, weight_ptr, targets_ptr, scale_ptr, losses_ptr,
    V, P_units, D, hidden_units, weight_units, z_loss, softcap,
    ROW_UNIT: tl.constexpr, STRIDE_UNIT: tl.constexpr, stride_hidden_d: tl.constexpr, stride_weight_d: tl.constexpr,
    ignore_index: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WRITE_GRADIENT: tl.constexpr, SCALE_GRADIENT: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """For row n of the chunk, computes losses[n] = scale (cross-entropy + z_loss lse^2) and
    replaces the logits by the loss's gradient.

    The first loop computes the row's maximum and sum of exponentials together, the second computes
    the gradient, in reverse order if REVERSE.
    """
    n = tl.program_id(0).to(tl.int64)
    P = P_units * ROW_UNIT
    row_ptr = logits_ptr + n * P
    # Shape (threads, VEC): the second axis is within a thread, so its reductions need no shuffle
    # and no barrier.
    lanes = tl.arange(0, BLOCK_V // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    scale = tl.load(scale_ptr)
    target = tl.load(targets_ptr + n).to(tl.int64)

    if target == ignore_index:
        # 0 * scale instead of 0: if every token is ignored, scale is infinite and the mean must be
        # NaN, like torch's.
        tl.store(losses_ptr + n, 0.0 * scale)
        if WRITE_GRADIENT:
            for start in range(0, P, BLOCK_V):
                cols = start + lanes
                tl.store(
                    row_ptr + cols,
                    tl.zeros_like(cols).to(logits_ptr.dtype.element_ty),
                    mask=cols < P,
                )
        return

    in_range = (target >= 0) & (target < V)
    safe_target = tl.where(in_range, target, 0)
    # The matmul rounded its logits. If the prediction is confident, the loss depends almost only on
    # the target's logit, so that one is computed again in fp32.
    dot = _dot_rows(
        hidden_ptr + n * hidden_units * STRIDE_UNIT, stride_hidden_d,
        weight_ptr + safe_target * weight_units * STRIDE_UNIT, stride_weight_d, 0, D, BLOCK_D,
    )  # fmt: skip
    target_logit, target_slope = _target_logit(dot, in_range, softcap, HAS_SOFTCAP)
    target_col = safe_target.to(tl.int32)

    maxima = tl.full([BLOCK_V // VEC], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([BLOCK_V // VEC], dtype=tl.float32)
    for start in tl.range(0, P, BLOCK_V, num_stages=STAGES):
        cols = start + lanes
        # The mask ends at P, a multiple of VEC, so that loads stay wide for every V.
        x = tl.load(row_ptr + cols, mask=cols < P, other=0.0, eviction_policy=KEEP).to(tl.float32)
        if HAS_SOFTCAP:
            x = softcap * _tanh(x / softcap)
        x = tl.where((cols < V) & (cols != target_col), x, float("-inf"))
        new_maxima = tl.maximum(maxima, tl.max(x, axis=1))
        shift = _finite(new_maxima)
        sums = sums * tl.exp(maxima - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        maxima = new_maxima
    maximum = _finite(tl.max(maxima, axis=0))
    others = maximum + tl.log(tl.sum(sums * tl.exp(maxima - maximum), axis=0))
    cross_entropy, lse, p_others, p_target = _loss_of(others, target_logit)
    tl.store(losses_ptr + n, scale * (cross_entropy + z_loss * lse * lse))

    if WRITE_GRADIENT:
        z_slope = 2.0 * z_loss * lse
        factor = 1.0
        if SCALE_GRADIENT:
            factor = scale
        target_gradient = factor * target_slope * (z_slope * p_target - p_others)
        others_factor = factor * (1.0 + z_slope)
        num_blocks = tl.cdiv(P, BLOCK_V)
        for i in tl.range(0, num_blocks, num_stages=STAGES):
            if REVERSE:
                cols = (num_blocks - 1 - i) * BLOCK_V + lanes
            else:
                cols = i * BLOCK_V + lanes
            raw = tl.load(
                row_ptr + cols, mask=cols < P, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            if HAS_SOFTCAP:
                gradient = (
                    others_factor
                    * tl.exp(softcap * _tanh(raw / softcap) - lse)
                    * _sech2(raw / softcap)
                )
            else:
                gradient = others_factor * tl.exp(raw - lse)
            gradient = tl.where(cols == target_col, target_gradient, gradient)
            gradient = tl.where(cols < V, gradient, 0.0)
            tl.store(row_ptr + cols, gradient.to(logits_ptr.dtype.element_ty), mask=cols < P)


@triton.jit(do_not_specialize=["V", "P_units", "D", "hidden_units", "weight_units"])
def held_gradient_kernel(
    logits_ptr, hidden_ptr, weight_ptr, targets_ptr, scale_ptr, losses_ptr,
    V, P_units, D, hidden_units, weight_units, z_loss, softcap,
    ROW_UNIT: tl.constexpr, STRIDE_UNIT: tl.constexpr, stride_hidden_d: tl.constexpr, stride_weight_d: tl.constexpr,
    ignore_index: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WRITE_GRADIENT: tl.constexpr, SCALE_GRADIENT: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Like streamed_gradient_kernel, for rows of at most BLOCK_V columns."""
    n = tl.program_id(0).to(tl.int64)
    P = P_units * ROW_UNIT
    cols = tl.arange(0, BLOCK_V)
    in_row = cols < P
    row_ptr = logits_ptr + n * P
    raw = tl.load(row_ptr + cols, mask=in_row, other=0.0, eviction_policy="evict_first")
    scale = tl.load(scale_ptr)
    target = tl.load(targets_ptr + n).to(tl.int64)

    if target == ignore_index:
        tl.store(losses_ptr + n, 0.0 * scale)
        if WRITE_GRADIENT:
            tl.store(row_ptr + cols, tl.zeros_like(raw), mask=in_row)
        return

    in_range = (target >= 0) & (target < V)
    safe_target = tl.where(in_range, target, 0)
    target_col = safe_target.to(tl.int32)
    dot = _dot_rows(
        hidden_ptr + n * hidden_units * STRIDE_UNIT, stride_hidden_d,
        weight_ptr + safe_target * weight_units * STRIDE_UNIT, stride_weight_d, 0, D, BLOCK_D,
    )  # fmt: skip

    x = raw.to(tl.float32)
    slope = 1.0
    if HAS_SOFTCAP:
        slope = _sech2(x / softcap)
        x = softcap * _tanh(x / softcap)
    x = tl.where((cols < V) & (cols != target_col), x, float("-inf"))
    # Kept for the gradient: exp(x - lse) = exp(x - shift) exp(shift - lse).
    shift = _finite(tl.max(x, axis=0))
    held = tl.exp(x - shift)
    others = shift + tl.log(tl.sum(held, axis=0))
    held *= slope

    target_logit, target_slope = _target_logit(dot, in_range, softcap, HAS_SOFTCAP)
    cross_entropy, lse, p_others, p_target = _loss_of(others, target_logit)
    tl.store(losses_ptr + n, scale * (cross_entropy + z_loss * lse * lse))
    if WRITE_GRADIENT:
        z_slope = 2.0 * z_loss * lse
        factor = 1.0
        if SCALE_GRADIENT:
            factor = scale
        # This is zero in the columns past V and in the target's column, which is written below; so
        # no column numbers are kept in registers for a comparison.
        gradient = held * (factor * (1.0 + z_slope) * tl.exp(shift - lse))
        tl.store(row_ptr + cols, gradient.to(logits_ptr.dtype.element_ty), mask=in_row)
        tl.debug_barrier()
        target_gradient = factor * target_slope * (z_slope * p_target - p_others)
        tl.store(row_ptr + target_col, target_gradient.to(logits_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["N"])
def loss_scale_kernel(targets_ptr, scale_ptr, N, ignore_index: tl.constexpr, BLOCK_N: tl.constexpr):
    """Computes scale = 1 / (number of targets that are not ignored) in one program, which suffices
    for up to a million targets.
    """
    counts = tl.zeros([BLOCK_N], dtype=tl.int32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        target = tl.load(targets_ptr + n, mask=n < N, other=0).to(tl.int64)
        counts += ((n < N) & (target != ignore_index)).to(tl.int32)
    tl.store(scale_ptr, 1.0 / tl.sum(counts, axis=0).to(tl.float32))


@triton.jit(do_not_specialize=["N", "V"])
def known_targets_kernel(
    targets_ptr, known_ptr, poison_ptr, N, V, ignore_index: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Like plain.known_targets, in one program."""
    unknown = tl.zeros([BLOCK_N], dtype=tl.int32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        target = tl.load(targets_ptr + n, mask=n < N, other=ignore_index).to(tl.int64)
        known = tl.where((target >= 0) & (target < V), target, ignore_index)
        tl.store(known_ptr + n, known, mask=n < N)
        unknown += (known != target).to(tl.int32)
    tl.store(poison_ptr, tl.where(tl.sum(unknown, axis=0) > 0, float("nan"), 0.0))


@triton.jit
def _multiply_block(x_ptr, factor, numel, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, numel, tl.num_programs(0).to(tl.int64) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < numel).to(tl.float32)
        tl.store(x_ptr + i, (x * factor).to(x_ptr.dtype.element_ty), mask=i < numel)


@triton.jit(do_not_specialize=["num_x", "num_y"])
def multiply_kernel(x_ptr, y_ptr, factor_ptr, num_x, num_y, BLOCK: tl.constexpr):
    """Multiplies x and y by factor. If factor is 1, which the host does not know, nothing is read
    or written.
    """
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        _multiply_block(x_ptr, factor, num_x, BLOCK)
        _multiply_block(y_ptr, factor, num_y, BLOCK)


def row_launch(
    row_length: int, itemsize: int, *, write_gradient: bool = True
) -> dict[str, int | bool | str]:
    """Returns the constants and warps of the pass over rows. If VEC is missing, they are for the
    held kernel, otherwise for the streamed one.
    """
    if write_gradient and row_length <= 16384:
        block = max(1024, triton.next_power_of_2(row_length))
        return {"BLOCK_V": block, "num_warps": max(4, block // 1024), "maxnreg": HELD_REGISTERS}
    if row_length <= 4096:
        block, warps = max(1024, triton.next_power_of_2(row_length)), 4
    elif row_length <= 65536:
        block, warps = 4096, 16
    else:
        block, warps = 8192, 32
    walk = {"VEC": 16 // itemsize, "STAGES": 1, "REVERSE": True, "KEEP": "evict_last"}
    return {"BLOCK_V": block, **walk, "num_warps": warps}


def softmax_gradient_(
    logits_NP: Tensor,
    vocabulary: int,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    scale: Tensor,
    losses_N: Tensor,
    loss: Loss,
    *,
    write_gradient: bool,
    scale_gradient: bool,
) -> None:
    """Fills losses_N and, with `write_gradient`, replaces the logits by their gradient (zero in the
    columns past V).

    `logits_NP` must be contiguous, with P >= vocabulary a multiple of 64. `scale` is a one-element
    fp32 tensor.
    """
    num_rows, row_length = logits_NP.shape
    if not num_rows:
        return
    launch = row_launch(row_length, logits_NP.element_size(), write_gradient=write_gradient)
    is_held = "VEC" not in launch
    if loss.softcap is not None and is_held:  # needs more registers, or it spills
        launch = {**launch, "maxnreg": 65536 // (32 * launch["num_warps"])}
    (hidden_n, hidden_d), (weight_v, weight_d) = hidden_ND.stride(), weight_VD.stride()
    unit = 8 if hidden_n % 8 == 0 and weight_v % 8 == 0 else 1
    _launch(
        held_gradient_kernel if is_held else streamed_gradient_kernel,
        num_rows,
        (logits_NP, hidden_ND, weight_VD, targets_N, scale, losses_N),
        (vocabulary, row_length // ROW_UNIT, hidden_ND.shape[1], hidden_n // unit, weight_v // unit,
         float(loss.z_loss), 1.0 if loss.softcap is None else float(loss.softcap)),
        ROW_UNIT=ROW_UNIT, STRIDE_UNIT=unit, stride_hidden_d=hidden_d, stride_weight_d=weight_d,
        ignore_index=loss.ignore_index, HAS_SOFTCAP=loss.softcap is not None, WRITE_GRADIENT=write_gradient,
        SCALE_GRADIENT=scale_gradient, **{"BLOCK_D": BLOCK_D, **launch},
    )  # fmt: skip


def loss_scale(targets_N: Tensor, *, ignore_index: int) -> Tensor:
    """Returns 1 / (number of targets that are not ignored) as a one-element fp32 tensor."""
    scale = torch.empty((), dtype=torch.float32, device=targets_N.device)
    constants = {"ignore_index": ignore_index, "BLOCK_N": 4096, "num_warps": 8}
    _launch(loss_scale_kernel, 1, (targets_N, scale), (targets_N.numel(),), **constants)
    return scale


def known_targets(
    targets_N: Tensor, vocabulary: int, *, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Like plain.known_targets, in one launch instead of six."""
    known_N = torch.empty_like(targets_N, dtype=torch.int64)
    poison = torch.empty((), dtype=torch.float32, device=targets_N.device)
    constants = {"ignore_index": ignore_index, "BLOCK_N": 4096, "num_warps": 8}
    given = targets_N.contiguous(), known_N, poison
    _launch(known_targets_kernel, 1, given, (targets_N.numel(), vocabulary), **constants)
    return known_N, poison


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies two contiguous tensors by a one-element `factor`, in place, in one launch."""
    first, second = tensors
    sizes = first.numel(), second.numel()
    # A gradient that is not needed has no memory. The kernel does not use its pointer, so any will
    # do.
    pointers = [x if x.numel() else factor for x in tensors]
    num_programs = min(triton.cdiv(max(sizes), 4096), 1024)
    if num_programs:
        _launch(multiply_kernel, num_programs, (*pointers, factor), sizes, BLOCK=4096, num_warps=8)


_LAUNCHES: dict[tuple, Launch] = {}


def _launch(
    kernel, num_programs: int, tensors: tuple[Tensor, ...], scalars: tuple, **constants
) -> None:
    # A Launch is compiled for either 32-bit or 64-bit integers.
    wide = [isinstance(x, int) and x >= 2**31 for x in scalars]
    types = [x.dtype for x in tensors]
    key = (id(kernel), tensors[0].device, *types, *wide, *constants.values())
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _LAUNCHES[key] = Launch(kernel, **constants)
    launch((num_programs, 1), tensors, scalars)
