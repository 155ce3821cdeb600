"""Attention over some of the keys. Ring attention (parallel/context_parallel/ring_attention.py)
combines such partial results into attention over all keys.

Legend: B batch, H query heads, K key heads, T_q queries, T_k keys, D head width.
"""

import torch
from torch import Tensor

from . import _check, _has_kernels, reference


def partial_forward(q, k, v, is_causal, scale) -> tuple[Tensor, Tensor]:
    """Returns o (B, H, T_q, D) over these keys and the log-sum-exp (B, H, T_q) of their scores,
    which is float64 for float64 inputs and fp32 otherwise. Nothing is saved for backward.

    Shapes: q (B, H, T_q, D), k and v (B, K, T_k, D). Raises ValueError as `flash_attention` does.
    """
    scale = _check(q, k, v, scale)
    if _has_kernels(q.device):
        return torch.ops.stepgauge.flash_attention(q, k, v, is_causal, scale)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return reference.forward(q, k, v, is_causal, scale)


def partial_backward(grad_o, q, k, v, o, lse, is_causal, scale) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what these keys contribute to dq, and their dk and dv. o and lse are those of
    attention over all keys: with them, p = exp(scale q kᵀ - lse) needs nothing else from the other
    keys.
    """
    if _has_kernels(q.device):
        run = torch.ops.stepgauge.flash_attention_backward
        return run(grad_o, q, k, v, o, lse, is_causal, scale)
    group = q.shape[1] // k.shape[1]
    repeated = (x.repeat_interleave(group, dim=1) for x in (k, v))
    dq, dk, dv = reference.backward(grad_o, q, *repeated, o, lse, is_causal, scale)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return dq, dk, dv
