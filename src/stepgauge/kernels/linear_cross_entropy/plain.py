"""The passes over a chunk's logits in plain PyTorch, on any device, with the same arithmetic as
triton.py.

Legend: N tokens of the chunk, D model width, V vocabulary, P length of a row in memory (V rounded
up).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """The options of the loss: the mean or sum over tokens, and the terms for each token."""

    mean: bool
    ignore_index: int
    z_loss: float
    softcap: float | None


def softmax_gradient_(
    logits_NP: Tensor,
    vocabulary: int,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    scale: Tensor,
    losses_N: Tensor,
    loss: Loss,
    *,
    write_gradient: bool,
    scale_gradient: bool,
) -> None:
    """Like triton.softmax_gradient_. On a CPU, raises ValueError for an unknown target."""
    valid_N = targets_N != loss.ignore_index
    targets_N = _checked(targets_N.where(valid_N, 0).long(), vocabulary)
    index_N1 = targets_N[:, None]
    target_N = (hidden_ND.to(losses_N.dtype) * weight_VD[targets_N].to(losses_N.dtype)).sum(dim=1)
    logits_NV = logits_NP[:, :vocabulary].to(losses_N.dtype)
    if (cap := loss.softcap) is not None:
        slope_NV = _sech2(logits_NV / cap).scatter_(1, index_N1, _sech2(target_N / cap)[:, None])
        logits_NV, target_N = cap * torch.tanh(logits_NV / cap), cap * torch.tanh(target_N / cap)
    others_N = logits_NV.scatter(1, index_N1, -torch.inf).logsumexp(dim=1)

    x_N = others_N - target_N
    cross_entropy_N = x_N.clamp(min=0) + torch.log1p(torch.exp(-x_N.abs()))
    lse_N = target_N + cross_entropy_N
    torch.mul((cross_entropy_N + loss.z_loss * lse_N**2).where(valid_N, 0), scale, out=losses_N)
    if not write_gradient:
        return
    z_slope_N = 2 * loss.z_loss * lse_N
    gradient_NV = (logits_NV - lse_N[:, None]).exp_().mul_((1 + z_slope_N)[:, None])
    of_target_N = z_slope_N * torch.sigmoid(-x_N) - torch.sigmoid(x_N)
    gradient_NV.scatter_(1, index_N1, of_target_N[:, None])
    if cap is not None:
        gradient_NV *= slope_NV
    if scale_gradient:
        gradient_NV *= scale
    logits_NP[:, :vocabulary] = gradient_NV.where(valid_N[:, None], 0)
    logits_NP[:, vocabulary:] = 0


def loss_scale(targets_N: Tensor, *, ignore_index: int) -> Tensor:
    """Returns 1 / (number of targets that are not ignored) as a one-element float64 tensor."""
    return 1 / (targets_N != ignore_index).sum().double()


def known_targets(
    targets_N: Tensor, vocabulary: int, *, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Returns the int64 targets with those outside the vocabulary replaced by `ignore_index`, and a
    term to add to the loss: NaN if any was replaced, otherwise 0.
    """
    targets_N = targets_N.long()
    known_N = torch.where(targets_N == targets_N.clamp(0, vocabulary - 1), targets_N, ignore_index)
    poison = torch.where((known_N == targets_N).all(), 0.0, math.nan)
    return known_N, poison.float()  # torch's default type may be another one


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies each tensor by `factor` in place."""
    for x in tensors:
        x.mul_(factor)


def _sech2(x: Tensor) -> Tensor:
    """Returns 1 - tanh(x)^2 without the subtraction, which would lose all digits for large |x|."""
    e = torch.exp(-2 * x.abs())
    return 4 * e / (1 + e) ** 2


def _checked(targets_N: Tensor, vocabulary: int) -> Tensor:
    """Raises ValueError for a target outside the vocabulary. Checks only on a CPU, because the host
    would have to wait for a GPU.
    """
    if targets_N.device.type == "cpu":
        outside_N = targets_N[(targets_N < 0) | (targets_N >= vocabulary)]
        if outside_N.numel():
            raise ValueError(
                f"target {outside_N[0].item()} is outside the vocabulary of {vocabulary}"
            )
    return targets_N
