"""The passes of partial.py over a chunk of logits, in plain PyTorch on any device.

Legend: C tokens of the chunk, V words of the part, P length of a row in memory.
"""

import torch
from torch import Tensor


def lse_of_others(logits_CP: Tensor, V: int, rows_C: Tensor) -> Tensor:
    """Returns the log-sum-exp of each row's logits except the target's. rows_C has the column of
    the target, or -1 if the part does not have it.
    """
    logits_CV = logits_CP[:, :V].to(_wide(logits_CP))
    is_target_CV = torch.arange(V, device=rows_C.device) == rows_C[:, None]
    return logits_CV.masked_fill(is_target_CV, -torch.inf).logsumexp(1)


def gradient_(
    logits_CP: Tensor, V: int, rows_C: Tensor, lse_C: Tensor, target_C: Tensor, factor_C: Tensor
) -> None:
    """Replaces the logits by factor (exp(logits - lse) - 1[target]) in place, taking the target's
    logit from target_C, and writes zeros past the vocabulary.
    """
    wide_CV = logits_CP[:, :V].to(_wide(logits_CP))
    gradient_CV = (wide_CV - lse_C[:, None]).exp_()
    is_target_CV = torch.arange(V, device=rows_C.device) == rows_C[:, None]
    gradient_CV = torch.expm1(target_C - lse_C)[:, None].where(is_target_CV, gradient_CV)
    logits_CP[:, :V] = gradient_CV * factor_C[:, None]
    logits_CP[:, V:] = 0


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
