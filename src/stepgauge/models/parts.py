"""The parts of a model that are chosen by name. A new kernel is a new row in one of the tables here.

norm       (width, eps=, device=, dtype=) -> nn.Module over the last dimension
attention  (q_BHTD, k_BHTD, v_BHTD, is_causal=) -> o_BHTD; keys may have fewer heads. The functions
           in WINDOWED also take window=: a query sees this many keys up to its own, and without a
           causal mask as many after it
loss       (hidden_BTD, weight_VD, targets_BT) -> mean cross-entropy in nats, a scalar
optimizer  (parameters, lr=, weight_decay=, betas=) -> torch.optim.Optimizer

Legend: B batch, H heads, T sequence, D head width (attention) or model width, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
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
    """y = x / sqrt(mean(x²) + eps) · weight in fp32, one PyTorch operation each (arXiv 1910.07467)."""

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
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.eps)
        return (x_fp32 * scale * self.weight).to(x.dtype)


def hidden_scores(length: int, *, is_causal: bool, window: int, device: torch.device) -> Tensor:
    """Returns a mask (T, T) that is True where a query does not see a key: later keys if causal, and
    keys outside of the window.
    """
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    hidden = ones.triu(1) if is_causal else ~ones
    return hidden | ones.tril(-window) | ones.triu(window) if window else hidden


def eager_attention(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, is_causal: bool = True, window: int = 0
) -> Tensor:
    """Returns softmax(q kᵀ / sqrt(D) + mask) v, with the whole score matrix in memory."""
    length, width = q_BHTD.shape[-2:]
    group = q_BHTD.shape[1] // k_BHTD.shape[1]
    if group > 1:
        k_BHTD, v_BHTD = (x.repeat_interleave(group, dim=1) for x in (k_BHTD, v_BHTD))
    with ranged("scores"):
        scores_BHTT = (q_BHTD @ k_BHTD.transpose(-2, -1)) / math.sqrt(width)
        if is_causal or window:
            device = q_BHTD.device
            hidden = hidden_scores(length, is_causal=is_causal, window=window, device=device)
            scores_BHTT = scores_BHTT.masked_fill(hidden, -math.inf)
    with ranged("softmax"):
        weights_BHTT = F.softmax(scores_BHTT, dim=-1).to(v_BHTD.dtype)
    with ranged("values"):
        return weights_BHTT @ v_BHTD


def sdpa(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    *,
    is_causal: bool = True,
    window: int = 0,
    backend: SDPBackend | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention, on the given backend or the one that torch chooses."""
    settings: dict[str, Any] = {"is_causal": is_causal}
    if window:
        length, device = q_BHTD.shape[-2], q_BHTD.device
        hidden = hidden_scores(length, is_causal=is_causal, window=window, device=device)
        settings = {"attn_mask": ~hidden}
    if k_BHTD.shape[1] != q_BHTD.shape[1]:
        settings["enable_gqa"] = True
    if backend is None:
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, **settings)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, **settings)


def cross_entropy(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """Output layer and loss as two operations. The logits are kept for backward."""
    with ranged("head"):
        logits_BTV = F.linear(hidden_BTD, weight_VD)
    with ranged("loss"):
        return F.cross_entropy(logits_BTV.flatten(0, -2), targets_BT.flatten())


def fused_cross_entropy(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """Output layer and loss in one operation that never stores all logits."""
    with ranged("head and loss"):
        return linear_cross_entropy(hidden_BTD.flatten(0, -2), weight_VD, targets_BT.flatten())


NORMS: Mapping[str, Callable[..., nn.Module]] = {
    "rmsnorm": functools.partial(nn.RMSNorm, eps=NORM_EPSILON),
    "layernorm": functools.partial(nn.LayerNorm, eps=NORM_EPSILON),
    "rmsnorm-eager": EagerRMSNorm,
    "triton": functools.partial(TritonRMSNorm, eps=NORM_EPSILON),
}

ATTENTIONS: Mapping[str, Callable[..., Tensor]] = {
    "sdpa": sdpa,
    "sdpa-flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "eager": eager_attention,
    "triton": flash_attention,
}
WINDOWED = ("sdpa", "eager", "triton")

LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy,
    "fused": fused_cross_entropy,
}


def adamw(parameters: Iterable[Any], **settings: Any) -> torch.optim.AdamW:
    """Returns torch's fused AdamW, or the plain one if a parameter is not floating-point."""
    groups = list(parameters)
    flat = [p for each in groups for p in (each["params"] if isinstance(each, dict) else [each])]
    fused = all(parameter.is_floating_point() for parameter in flat)
    return torch.optim.AdamW(groups, fused=fused, **settings)


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw-foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw-loop": functools.partial(torch.optim.AdamW, foreach=False, fused=False),
    "fused": FusedAdamW,
    "sgd": torch.optim.SGD,
}


def build_optimizer(name: str, parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """Returns the named optimizer. Settings that the class does not take, as betas for SGD, are
    dropped.

    Raises ValueError for master weights if the optimizer has none.
    """
    build = OPTIMIZERS[name]
    if not settings.get("master_weights"):
        settings.pop("master_weights", None)
    elif name != "fused":
        raise ValueError(f"optimizer is {name!r}; bf16-master needs --optimizer fused")
    if name == "sgd":
        settings.pop("betas", None)
    return build(parameters, **settings)
