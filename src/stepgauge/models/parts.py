"""The parts of a model that are chosen by name: a fused kernel is one more row of a table here.

norm       (width, device=, dtype=) -> nn.Module over the last dimension
attention  (q_BHTD, k_BHTD, v_BHTD) -> o_BHTD, causal
loss       (hidden_BTD, weight_VD, targets_BT) -> mean cross-entropy in nats, a scalar
optimizer  (parameters, lr=, weight_decay=, betas=) -> torch.optim.Optimizer

Legend: B batch, H heads, T sequence, D width of a head (attention) or of the model, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepgauge.kernels.adamw import FusedAdamW
from stepgauge.kernels.attention import flash_attention
from stepgauge.kernels.linear_cross_entropy import linear_cross_entropy
from stepgauge.kernels.rms_norm import TritonRMSNorm
from stepgauge.ranges import ranged

NORM_EPSILON = 1e-5


class EagerRMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight, one torch operation a term, computed in fp32 (Zhang &
    Sennrich 2019).
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float = NORM_EPSILON,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def eager_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(D) + causal mask) v with the whole score matrix in memory."""
    length, width = q_BHTD.shape[-2:]
    masked = torch.ones(length, length, dtype=torch.bool, device=q_BHTD.device).triu(1)
    with ranged("scores"):
        scores_BHTT = (q_BHTD @ k_BHTD.transpose(-2, -1)) / math.sqrt(width)
        scores_BHTT = scores_BHTT.masked_fill(masked, -math.inf)
    with ranged("softmax"):
        weights_BHTT = F.softmax(scores_BHTT, dim=-1).to(v_BHTD.dtype)
    with ranged("values"):
        return weights_BHTT @ v_BHTD


def sdpa(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, backend: SDPBackend | None = None
) -> Tensor:
    """torch's scaled_dot_product_attention, on one named backend or on the one that torch picks."""
    if backend is None:
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)


def cross_entropy(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """Output layer and loss as two operations; the logits are held for backward."""
    with ranged("head"):
        logits_BTV = F.linear(hidden_BTD, weight_VD)
    with ranged("loss"):
        return F.cross_entropy(logits_BTV.flatten(0, -2), targets_BT.flatten())


def fused_cross_entropy(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """Output layer and loss in one operation that never holds the logits."""
    with ranged("head and loss"):
        return linear_cross_entropy(hidden_BTD.flatten(0, -2), weight_VD, targets_BT.flatten())


NORMS: Mapping[str, Callable[..., nn.Module]] = {
    "rmsnorm": functools.partial(nn.RMSNorm, eps=NORM_EPSILON),
    "layernorm": functools.partial(nn.LayerNorm, eps=NORM_EPSILON),
    "rmsnorm-eager": EagerRMSNorm,
    "triton": functools.partial(TritonRMSNorm, eps=NORM_EPSILON),
}

ATTENTIONS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": sdpa,
    "sdpa-flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "eager": eager_attention,
    "triton": functools.partial(flash_attention, is_causal=True),
}

LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy,
    "fused": fused_cross_entropy,
}

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, fused=True),
    "adamw-foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw-loop": functools.partial(torch.optim.AdamW, foreach=False, fused=False),
    "fused": FusedAdamW,
    "sgd": torch.optim.SGD,
}


def build_optimizer(name: str, parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """The optimizer of that name; settings that the class does not take (betas of SGD) are left
    out.
    """
    build = OPTIMIZERS[name]
    if name == "sgd":
        settings.pop("betas", None)
    return build(parameters, **settings)
