"""The passes of partial.py over a chunk of logits, in Triton. Each program processes one row; each
element is read once and, for the gradient, written once. Rows are contiguous, and P is a multiple
of 64.

Legend: C tokens of the chunk, V words of the part, P length of a row in memory.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile_ops import _finite

BLOCK, NUM_WARPS = 4096, 8  # 16 bf16 numbers per thread: two loads of 16 bytes


@triton.jit(do_not_specialize=["V"])
def lse_kernel(logits, rows, lse, V, P, BLOCK: tl.constexpr):
    """Computes lse, the log-sum-exp of a row's logits except the one in the row's column `rows`."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(rows + row)
    columns = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, P, BLOCK):
        at = start + columns
        hidden = (at >= V) | (at == target)
        # masked by P, which is a multiple of 64, so that loads are 16 bytes wide
        x = tl.load(logits + row * P + at, mask=at < P, other=0.0).to(tl.float32)
        x = tl.where(hidden, float("-inf"), x)
        higher = tl.maximum(highest, x)
        total = total * tl.exp(highest - _finite(higher)) + tl.exp(x - _finite(higher))
        highest = higher
    most = tl.max(highest, 0)
    total = tl.sum(total * tl.exp(highest - _finite(most)), 0)
    tl.store(lse + row, _finite(most) + tl.log(total))


@triton.jit(do_not_specialize=["V"])
def gradient_kernel(
    logits, rows, lse, target_logits, factors, V, P, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replaces logits by factor (exp(logits - lse) - 1[target]), with zeros from V to P."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(rows + row)
    lse_of_row = tl.load(lse + row)
    factor = tl.load(factors + row)
    p_target = tl.exp(tl.load(target_logits + row) - lse_of_row)
    columns = tl.arange(0, BLOCK)
    for start in range(0, P, BLOCK):
        at = start + columns
        x = tl.load(logits + row * P + at, mask=at < P, other=0.0).to(tl.float32)
        gradient = tl.where(at == target, p_target - 1.0, tl.exp(x - lse_of_row)) * factor
        # Memory past V is undefined. A factor of 0 must give 0 even if the gradient is NaN.
        gradient = tl.where(at < V, tl.where(factor == 0.0, 0.0, gradient), 0.0)
        tl.store(logits + row * P + at, gradient.to(logits.dtype.element_ty), mask=at < P)


def lse_of_others(logits_CP: Tensor, V: int, rows_C: Tensor) -> Tensor:
    """Like partial_plain.lse_of_others, in fp32."""
    lse_C = torch.empty(len(rows_C), dtype=torch.float32, device=rows_C.device)
    with _on_device(logits_CP):
        lse_kernel[(len(rows_C),)](
            logits_CP,
            rows_C.contiguous(),
            lse_C,
            V,
            logits_CP.shape[1],
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return lse_C


def gradient_(
    logits_CP: Tensor, V: int, rows_C: Tensor, lse_C: Tensor, target_C: Tensor, factor_C: Tensor
) -> None:
    """Like partial_plain.gradient_."""
    of_tokens = (x.contiguous() for x in (rows_C, lse_C, target_C, factor_C))
    num_rows, P = logits_CP.shape
    with _on_device(logits_CP):
        gradient_kernel[(num_rows,)](logits_CP, *of_tokens, V, P, BLOCK=BLOCK, num_warps=NUM_WARPS)


def _on_device(x: Tensor):
    """Makes the tensor's device current, because Triton launches on that device. Does nothing in
    the interpreter.
    """
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
