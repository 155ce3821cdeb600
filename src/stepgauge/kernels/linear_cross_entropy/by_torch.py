"""Linear + cross-entropy in torch's operators, for the sizes at which they are faster
(spec/fused_loss.py).

Legend: N tokens, D model width, V vocabulary.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepgauge.kernels.plain_eager import is_plain_eager
from stepgauge.spec.fused_loss import torch_computes

from . import chunked, plain

# Read once at import, because torch.compile cannot trace the environment.
IS_ALLOWED = os.environ.get("STEPGAUGE_LOSS_BY_TORCH") != "0"


def takes(hidden: Tensor, weight_VD: Tensor, dtype: torch.dtype, **options: Any) -> bool:
    """True if torch computes the loss. `options` are those of the fused loop, which torch's
    operators do not have; if any is set, the result is False.
    """
    if not IS_ALLOWED or any(options.values()) or dtype != torch.bfloat16:
        return False
    if hidden.device.type != "cuda" or not chunked.HAS_TRITON:
        return False
    V, D = weight_VD.shape
    is_compiling = torch.compiler.is_compiling()
    return torch_computes(hidden.numel() // max(1, D), D, V, compiled=is_compiling)


def loss(
    hidden: Tensor, weight_VD: Tensor, targets: Tensor, *, reduction: str, ignore_index: int
) -> Tensor:
    """Returns the scalar loss in fp32. It is NaN if a target is outside the vocabulary, for which
    torch's kernel would abort the process.
    """
    V, D = weight_VD.shape
    logits_NV = F.linear(hidden.reshape(-1, D), weight_VD).float()
    targets_N = targets.reshape(-1)
    by_kernel = is_plain_eager(targets_N)
    kernels = chunked.kernels_for(targets.device, logits_NV.dtype) if by_kernel else plain
    known_N, poison = kernels.known_targets(targets_N, V, ignore_index=ignore_index)
    result = F.cross_entropy(logits_NV, known_N, ignore_index=ignore_index, reduction=reduction)
    return result + poison
