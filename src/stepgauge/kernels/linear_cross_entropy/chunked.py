"""The loop over chunks of tokens: three matmuls per chunk, and one pass over the chunk's logits
between them.

Gradients are computed in the forward pass while the chunk's logits exist; computing them in
backward would need either all logits or a fourth matmul.
docs/log/2026-11-21-linear_cross_entropy.md compares the possible orders of the loops.

Legend: N tokens, D model width, V vocabulary, C tokens of a chunk, P length of a row of logits in
memory (V rounded up), R rows of the weight that the matmuls use (P or V).
"""

import importlib.util
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from stepgauge.spec.fused_loss import ROW_MULTIPLE, logits_bytes, operand_rows

from . import plain
from .plain import Loss

ACCUMULATIONS = ("auto", "weight", "fp32")
# A bf16 running sum is rounded once per chunk. Eight roundings of growing partial sums have about
# twice the error of one rounding of the total (square root of (1 + 2 + ... + 8) / 8); for more
# chunks, "auto" uses an fp32 sum.
MAX_ROUNDED_CHUNKS = 8
# Smaller than on CUDA, because plain PyTorch holds several fp32 copies of a chunk.
MAX_LOGITS_BYTES_PLAIN = 64 * 2**20
CHUNK_MULTIPLE = 128

HAS_TRITON = importlib.util.find_spec("triton") is not None


def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Returns the module that processes a chunk's rows: the Triton kernels on CUDA if Triton is
    installed, otherwise plain PyTorch. float64 also runs in plain PyTorch, because the kernels
    compute in fp32.
    """
    if device.type == "cuda" and dtype != torch.float64 and HAS_TRITON:
        from . import triton

        return triton
    return plain


def chunk_tokens(num_tokens: int, row_bytes: int, max_logits_bytes: int) -> int:
    """Returns the tokens of a chunk: chunks of equal size within `max_logits_bytes`, rounded up to
    whole matmul tiles if that fits.
    """
    limit = max(1, max_logits_bytes // row_bytes)
    num_chunks = max(1, math.ceil(num_tokens / limit))
    tokens = math.ceil(num_tokens / num_chunks)
    whole = math.ceil(tokens / CHUNK_MULTIPLE) * CHUNK_MULTIPLE
    return max(1, whole if whole <= limit else tokens)


def chunk_shape(
    hidden_ND: Tensor, V: int, compute_dtype: torch.dtype, max_logits_bytes: int
) -> tuple[int, int]:
    """Returns C and P for these tokens; a `max_logits_bytes` of 0 means the default limit."""
    N, D = hidden_ND.shape
    P = math.ceil(V / ROW_MULTIPLE) * ROW_MULTIPLE
    row_bytes = P * compute_dtype.itemsize
    is_plain = kernels_for(hidden_ND.device, compute_dtype) is plain
    default = MAX_LOGITS_BYTES_PLAIN if is_plain else logits_bytes(N, D, row_bytes)
    return chunk_tokens(N, row_bytes, max_logits_bytes or default), P


def transient_bytes(arguments: Sequence[Any]) -> int:
    """Returns the temporary bytes for the operator's arguments: a chunk's logits, and operands that
    are cast or padded.
    """
    hidden_ND, weight_VD, _, compute_dtype, *_ = arguments
    C, P = chunk_shape(hidden_ND, len(weight_VD), compute_dtype, arguments[9])
    rows = operand_rows(len(weight_VD), compute_dtype.itemsize)
    values = min(C, len(hidden_ND)) * P
    if hidden_ND.dtype != compute_dtype:
        values += hidden_ND.numel()
    if weight_VD.dtype != compute_dtype or rows != len(weight_VD):
        values += rows * weight_VD.shape[1]
    return values * compute_dtype.itemsize


def as_operand(weight_VD: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Casts the weight and pads it with rows of zeros."""
    if rows == len(weight_VD):
        return weight_VD.to(dtype)
    weight_RD = weight_VD.new_empty((rows, weight_VD.shape[1]), dtype=dtype)
    weight_RD[: len(weight_VD)] = weight_VD
    weight_RD[len(weight_VD) :] = 0
    return weight_RD


def held_dtype(input_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
    """Returns the type of a gradient that is kept for backward: the input's, or fp32 if matmuls
    cannot write the input's type.
    """
    return input_dtype if input_dtype in (compute_dtype, torch.float32) else torch.float32


def held_weight_dtype(weight_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
    """Like held_dtype, but fp32 for fp16, because the sum before scaling can exceed 65,504."""
    return (
        torch.float32 if weight_dtype == torch.float16 else held_dtype(weight_dtype, compute_dtype)
    )


def scales_gradient(compute_dtype: torch.dtype) -> bool:
    """True if the logits' gradient includes 1/N. In fp16, p/N underflows, so backward
    multiplies.
    """
    return compute_dtype != torch.float16


def loss_and_gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    loss: Loss,
    *,
    compute_dtype: torch.dtype,
    accumulation: str,
    max_logits_bytes: int,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the loss, gradients of hidden and weight for an incoming gradient of one, and 1/N.

    Gradients that are not needed are empty. In fp16, they must still be multiplied by 1/N.
    """
    N, V, targets_N = len(targets_N), len(weight_VD), targets_N.contiguous()
    C, P = chunk_shape(hidden_ND, V, compute_dtype, max_logits_bytes)
    held_weight = held_weight_dtype(weight_VD.dtype, compute_dtype)
    sum_dtype = _sum_dtype(held_weight, accumulation, num_chunks=math.ceil(N / C))
    scale = _loss_scale(targets_N, loss, hidden_ND, compute_dtype)
    losses_N = hidden_ND.new_empty(N, dtype=scale.dtype)
    held_hidden = held_dtype(hidden_ND.dtype, compute_dtype)
    grad_hidden = hidden_ND.new_empty(hidden_ND.shape if need_hidden else 0, dtype=held_hidden)
    grad_weight = hidden_ND.new_empty(weight_VD.shape if need_weight else 0, dtype=sum_dtype)
    R = operand_rows(V, compute_dtype.itemsize)
    hidden_ND, weight_RD = hidden_ND.to(compute_dtype), as_operand(weight_VD, R, compute_dtype)
    logits_CP = hidden_ND.new_empty(min(C, N), P)
    for first in range(0, N, C):
        here = slice(first, first + C)
        chunk = hidden_ND[here], weight_RD, targets_N[here], scale, losses_N[here]
        _one_chunk(
            logits_CP[: N - first], V, chunk, loss,
            grad_hidden[here] if need_hidden else None, grad_weight if need_weight else None, accumulate=first > 0,
        )  # fmt: skip
    del logits_CP
    if N == 0:
        grad_weight.zero_()
    total = losses_N.sum() if N or not loss.mean else losses_N.new_full((), math.nan)
    return total, grad_hidden, grad_weight.to(held_weight), scale


def _sum_dtype(held_weight: torch.dtype, accumulation: str, *, num_chunks: int) -> torch.dtype:
    """Returns the type in which the weight's gradient is summed between chunks."""
    in_fp32 = accumulation == "fp32" or (accumulation == "auto" and num_chunks > MAX_ROUNDED_CHUNKS)
    return torch.float32 if in_fp32 and num_chunks > 1 and held_weight.itemsize < 4 else held_weight


def _loss_scale(
    targets_N: Tensor, loss: Loss, hidden_ND: Tensor, compute_dtype: torch.dtype
) -> Tensor:
    """Returns 1/N for a mean and 1 for a sum, in the type of the losses."""
    dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    if not loss.mean:
        return hidden_ND.new_ones((), dtype=dtype)
    kernels = kernels_for(hidden_ND.device, compute_dtype)
    return kernels.loss_scale(targets_N, ignore_index=loss.ignore_index).to(dtype)


def _one_chunk(
    logits_CP: Tensor,
    V: int,
    chunk: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    loss: Loss,
    grad_hidden_CD: Tensor | None,
    grad_weight_VD: Tensor | None,
    *,
    accumulate: bool,
) -> None:
    """Computes a chunk's logits, replaces them by their gradient, and multiplies that into the
    gradients of hidden and weight.

    `chunk` is (hidden, weight, targets, scale, output for the losses).
    """
    hidden_CD, weight_RD = chunk[:2]
    R, dtype = len(weight_RD), logits_CP.dtype
    logits_CR = logits_CP[:, :R]
    torch.mm(hidden_CD, weight_RD.mT, out=logits_CR)
    kernels_for(logits_CP.device, dtype).softmax_gradient_(
        logits_CP, V, *chunk, loss,
        write_gradient=grad_hidden_CD is not None or grad_weight_VD is not None,
        scale_gradient=scales_gradient(dtype),
    )  # fmt: skip
    if grad_hidden_CD is not None:
        _matmul_(grad_hidden_CD, logits_CR, weight_RD)
    if grad_weight_VD is not None:
        for rows in _aligned_and_rest(V, R):
            _matmul_(grad_weight_VD[rows], logits_CR[:, rows].mT, hidden_CD, accumulate=accumulate)


def _aligned_and_rest(V: int, R: int) -> list[slice]:
    """Returns the vocabulary as one slice, or, if the weight is padded, as the largest multiple of
    ROW_MULTIPLE and the remaining words.
    """
    whole = V if R == V else V - V % ROW_MULTIPLE
    return [part for part in (slice(0, whole), slice(whole, V)) if part.start < part.stop]


def _matmul_(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """Computes out = a b, or out += a b, summed in fp32 and rounded once to `out`'s type."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif not a.is_cuda:
        _matmul_(out, a.to(out.dtype), b.to(out.dtype), accumulate=accumulate)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
