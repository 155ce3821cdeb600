"""Linear + cross-entropy over a part of the vocabulary. The head of a tensor parallel network
(vocabulary_loss.py of parallel/) combines the parts into the loss over all of it.

For each token, a part returns the log-sum-exp of its own logits, and the target's logit if the part
has that word. With the log-sum-exp over all parts, each part can compute its gradient,
p - 1[target] with p = exp(l - lse). Forward and backward both loop over chunks of logits, which
takes four matmuls in all; a single process computes the gradients in forward with three.

Legend: N tokens, D model width, V words of this part, C tokens of a chunk, P length of a row of
logits in memory, R rows of the weight that the matmuls use.
"""

import torch
from torch import Tensor

from stepgauge.spec.fused_loss import operand_rows

from . import chunked
from .chunked import _aligned_and_rest, _matmul_


def partial_forward(hidden_ND: Tensor, weight_VD: Tensor, rows_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns lse_N, the log-sum-exp of the part's logits hidden weight^T, and target_N, the logits
    of the targets, in fp32, or float64 for float64 inputs.

    rows_N (int64) has the row of the target's word in this part, or -1 if the part does not have
    the word; target_N is then 0. hidden and weight must have the same type. Nothing is saved for
    backward.
    """
    weight_RD, C, P = _operands(hidden_ND, weight_VD)
    lse_N = hidden_ND.new_empty(len(hidden_ND), dtype=_wide(hidden_ND))
    target_N = _target_logits(hidden_ND, weight_VD, rows_N, C)
    logits_CP = hidden_ND.new_empty(min(C, len(hidden_ND)), P)
    for here, chunk_CP in _chunks(hidden_ND, logits_CP):
        torch.mm(hidden_ND[here], weight_RD.mT, out=chunk_CP[:, : len(weight_RD)])
        others_C = _kernels_for(hidden_ND).lse_of_others(chunk_CP, len(weight_VD), rows_N[here])
        with_target_C = torch.logaddexp(others_C, target_N[here])
        lse_N[here] = with_target_C.where(rows_N[here] >= 0, others_C)
    return lse_N, target_N


def partial_backward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    rows_N: Tensor,
    lse_N: Tensor,
    target_N: Tensor,
    factor_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of sum_n factor_n (lse_n - target_n) with respect to hidden (only this
    part's contribution) and weight. lse_N is that of the whole vocabulary, target_N the part's own
    from partial_forward.
    """
    weight_RD, C, P = _operands(hidden_ND, weight_VD)
    V, R = len(weight_VD), len(weight_RD)
    grad_hidden_ND = torch.empty_like(hidden_ND)
    one_chunk = len(hidden_ND) <= C
    sum_dtype = weight_VD.dtype if one_chunk else _wide(weight_VD)
    grad_weight_VD = weight_VD.new_zeros(weight_VD.shape, dtype=sum_dtype)
    logits_CP = hidden_ND.new_empty(min(C, len(hidden_ND)), P)
    for here, chunk_CP in _chunks(hidden_ND, logits_CP):
        chunk_CR = chunk_CP[:, :R]
        torch.mm(hidden_ND[here], weight_RD.mT, out=chunk_CR)
        per_token = (x[here] for x in (rows_N, lse_N, target_N, factor_N))
        _kernels_for(hidden_ND).gradient_(chunk_CP, V, *per_token)
        _matmul_(grad_hidden_ND[here], chunk_CR, weight_RD)
        for words in _aligned_and_rest(V, R):
            gradient_VC = chunk_CR[:, words].mT
            _matmul_(grad_weight_VD[words], gradient_VC, hidden_ND[here], accumulate=here.start > 0)
    return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype)


def _operands(hidden_ND: Tensor, weight_VD: Tensor) -> tuple[Tensor, int, int]:
    """Returns the weight as the matmuls use it, the tokens of a chunk, and a row's length in
    memory.
    """
    if hidden_ND.dtype != weight_VD.dtype:
        raise ValueError(
            f"hidden is {hidden_ND.dtype} and weight is {weight_VD.dtype}: expected one type"
        )
    C, P = chunked.chunk_shape(hidden_ND, len(weight_VD), hidden_ND.dtype, 0)
    rows = operand_rows(len(weight_VD), hidden_ND.dtype.itemsize)
    return chunked.as_operand(weight_VD, rows, hidden_ND.dtype), C, P


def _chunks(hidden_ND: Tensor, logits_CP: Tensor):
    """Yields the slice of each chunk of tokens, and the memory for its logits."""
    C = max(1, len(logits_CP))
    for first in range(0, len(hidden_ND), C):
        here = slice(first, min(first + C, len(hidden_ND)))
        yield here, logits_CP[: here.stop - here.start]


def _target_logits(hidden_ND: Tensor, weight_VD: Tensor, rows_N: Tensor, C: int) -> Tensor:
    """Returns each target's logit, not rounded to the matmuls' type, or 0 if the part lacks the
    word.
    """
    chunks = []
    for hidden_CD, rows_C in zip(hidden_ND.split(C), rows_N.split(C), strict=True):
        targets_CD = weight_VD[rows_C.clamp(min=0)]
        logits_C = (hidden_CD.to(_wide(hidden_ND)) * targets_CD.to(_wide(hidden_ND))).sum(1)
        chunks.append(logits_C.where(rows_C >= 0, 0))
    return torch.cat(chunks) if chunks else hidden_ND.new_empty(0, dtype=_wide(hidden_ND))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _kernels_for(hidden_ND: Tensor):
    """Returns the module that processes a chunk's rows, in Triton or in plain PyTorch."""
    if chunked.kernels_for(hidden_ND.device, hidden_ND.dtype) is chunked.plain:
        from . import partial_plain as module
    else:
        from . import partial_triton as module
    return module
