"""The oracle of linear + cross-entropy: the equation itself, holding all logits.

Legend: N tokens, D model width, V vocabulary.
"""

import torch
from torch import Tensor


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Returns the sum or mean over n of `lse_n - l_n[target_n] + z_loss lse_n^2`, with
    l = cap(hidden weight^T) and lse its log-sum-exp.

    `cap(x) = softcap tanh(x / softcap)`, or x if `softcap` is None. Tokens whose target is
    `ignore_index` count neither in the sum nor in the mean. Computes in the inputs' type and is
    differentiated by autograd: pass float64 for reference values.
    """
    logits_NV = hidden_ND @ weight_VD.mT
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    valid_N = targets_N != ignore_index
    lse_N = logits_NV.logsumexp(dim=-1)
    target_N = logits_NV.gather(-1, targets_N.where(valid_N, 0)[..., None])[..., 0]
    total = (lse_N - target_N + z_loss * lse_N**2).where(valid_N, 0).sum()
    return total / valid_N.sum() if reduction == "mean" else total
