"""What partial.py does to a chunk of logits, in Triton: a program a row, each element read once and
in the gradient written once. Rows lie one after another, P a multiple of 64.

Legend: C tokens of the chunk, V words of the part, P a row's length in memory.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile_ops import _finite

BLOCK, NUM_WARPS = 4096, 8  # 16 bf16 a thread: two loads of 16 bytes


@triton.jit(do_not_specialize=["V"])
def lse_kernel(logits, rows, lse, V, P, BLOCK: tl.constexpr):
    """lse = log sum exp of a row's logits but the one of column `rows`."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(rows + row)
    columns = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, P, BLOCK):
        at = start + columns
        hidden = (at >= V) | (at == target)
        # masked by P, a multiple of 64, for loads of 16 bytes
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
    """logits = factor (exp(logits - lse) - 1[target]), and zeros from V to P."""
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
        # what lies past V is nobody's, and a token that does not count must not be NaN times zero
        gradient = tl.where(at < V, tl.where(factor == 0.0, 0.0, gradient), 0.0)
        tl.store(logits + row * P + at, gradient.to(logits.dtype.element_ty), mask=at < P)


def lse_of_others(logits_CP: Tensor, V: int, rows_C: Tensor) -> Tensor:
    """As partial_plain.lse_of_others, fp32."""
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
    """As partial_plain.gradient_."""
    of_tokens = (x.contiguous() for x in (rows_C, lse_C, target_C, factor_C))
    num_rows, P = logits_CP.shape
    with _on_device(logits_CP):
        gradient_kernel[(num_rows,)](logits_CP, *of_tokens, V, P, BLOCK=BLOCK, num_warps=NUM_WARPS)


def _on_device(x: Tensor):
    """Triton launches on the current device: the tensor's own, or none under the interpreter."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
