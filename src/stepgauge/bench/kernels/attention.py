"""Attention, compared with its peers.

Legend: B batch, H heads, T sequence, D head width.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepgauge.bench.kernels.operation import (
    DTYPES,
    Differentiable,
    Implementation,
    Operation,
    compiled,
    generator,
)
from stepgauge.kernels.attention import flash_attention
from stepgauge.measure.accuracy import largest_error
from stepgauge.spec.kernel import AttentionSpec

# FLOPs of each pass, as multiples of the forward's. FLOPs that an implementation recomputes do not
# count.
FLOPS_PER_FORWARD = {"forward": 1.0, "backward": 2.5, "both": 3.5}
MOST_SCORES = 2**27  # number of float64 scores that the oracle holds at once
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_output(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, is_causal: bool) -> Tensor:
    """Computes attention with plain PyTorch operations: scores, mask, softmax, product."""
    scores_BHTT = (q_BHTD @ k_BHTD.transpose(-1, -2)) * q_BHTD.shape[-1] ** -0.5
    if is_causal:
        visible_TT = torch.ones(
            scores_BHTT.shape[-2:], dtype=torch.bool, device=q_BHTD.device
        ).tril()
        scores_BHTT = scores_BHTT.masked_fill(~visible_TT, -torch.inf)
    return scores_BHTT.softmax(-1) @ v_BHTD


def _sdpa(backend: SDPBackend) -> Implementation:
    return Implementation(
        lambda spec: functools.partial(F.scaled_dot_product_attention, is_causal=spec.causal),
        around=lambda: sdpa_kernel(backend),
    )


def _flash_attention_4(spec: AttentionSpec) -> Attention:
    from flash_attn.cute.interface import flash_attn_func

    def run(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        transposed = (x.transpose(1, 2) for x in (q_BHTD, k_BHTD, v_BHTD))
        return flash_attn_func(*transposed, causal=spec.causal)[0].transpose(1, 2)

    return run


def _eager(spec: AttentionSpec) -> Attention:
    return functools.partial(attention_output, is_causal=spec.causal)


IMPLEMENTATIONS = {
    "ours": Implementation(lambda spec: functools.partial(flash_attention, is_causal=spec.causal)),
    "eager": Implementation(_eager),
    "compile": Implementation(lambda spec: compiled(_eager(spec))),
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "math": _sdpa(SDPBackend.MATH),
    "fa4": Implementation(_flash_attention_4),
}


class Case(Differentiable):
    def __init__(self, spec: AttentionSpec):
        dtype, random = DTYPES[spec.dtype], generator(spec)
        shape = (spec.batch, spec.heads, spec.sequence, spec.width)
        q, k, v, grad = (
            torch.randn(shape, device=spec.device, dtype=dtype, generator=random) for _ in range(4)
        )
        exact = exact_results(q, k, v, grad, is_causal=spec.causal)
        error_of = functools.partial(largest_error, exact)
        super().__init__([x.requires_grad_() for x in (q, k, v)], grad, error_of)


@torch.no_grad()
def exact_results(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, grad_BHTD: Tensor, *, is_causal: bool
) -> list[Tensor]:
    """Returns o, dq, dk and dv in float64. Processes a chunk of queries at a time to bound memory."""
    length, width = q_BHTD.shape[-2:]
    chunk = max(1, MOST_SCORES // (q_BHTD[..., 0].numel()))
    exact = [torch.zeros(q_BHTD.shape, dtype=torch.float64, device=q_BHTD.device) for _ in range(4)]
    o, dq, dk, dv = exact
    for first in range(0, length, chunk):
        rows = slice(first, min(first + chunk, length))
        visible = slice(0, rows.stop if is_causal else length)
        q, grad = (x[..., rows, :].double() for x in (q_BHTD, grad_BHTD))
        k, v = (x[..., visible, :].double() for x in (k_BHTD, v_BHTD))
        p = (q @ k.mT) * width**-0.5
        if is_causal:
            later = torch.ones(p.shape[-2:], dtype=torch.bool, device=p.device).triu(first + 1)
            p.masked_fill_(later, -torch.inf)
        p = p.softmax(-1)
        o[..., rows, :] = p @ v
        dv[..., visible, :] += p.mT @ grad
        # The softmax's Jacobian: dS = P (dP - rowsum(o grad)).
        ds = p.mul_(grad @ v.mT - (o[..., rows, :] * grad).sum(-1, keepdim=True)).mul_(width**-0.5)
        dq[..., rows, :] = ds @ k
        dk[..., visible, :] += ds.mT @ q
    return exact


def num_flops(spec: AttentionSpec, name: str) -> float:
    """Returns the FLOPs of the passes: 4 B H T² D in the forward, half of that if causal."""
    forward = 4 * spec.batch * spec.heads * spec.sequence**2 * spec.width
    return forward * (0.5 if spec.causal else 1) * FLOPS_PER_FORWARD[spec.passes]


OPERATION = Operation(
    spec=AttentionSpec,
    implementations=IMPLEMENTATIONS,
    case=Case,
    ceiling="matmul",
    work=num_flops,
    reduction=lambda spec: max(spec.sequence, spec.width),
)
