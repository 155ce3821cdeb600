"""Cross-entropy of logits of which each rank has those of some words.

Legend: N tokens, D model width, V words of this rank.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepgauge.parallel.autograd.first_derivatives import without_second_derivative
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream, over_ranks

IGNORED = -100  # the target of a token that does not count, as in F.cross_entropy


@dataclasses.dataclass(frozen=True)
class PartialLoss:
    """Linear + cross-entropy over some of the vocabulary, of which a whole can be put together.

    forward   (hidden_ND, weight_VD, rows_N) -> the log-sum-exp of the part's logits, and the
              target's logit; rows_N is the target's row of the weight, -1 where it has none
    backward  (hidden_ND, weight_VD, rows_N, lse_N, target_N, factor_N) -> the gradients of hidden
              and weight of sum factor (lse - target), with the lse of the whole vocabulary
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor]]


@torch.compiler.disable
def fused_vocabulary_parallel_cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    targets: Tensor,
    *,
    first_row: int,
    vocab_size: int,
    stream: ResidualStream,
    partial_loss: PartialLoss,
) -> Tensor:
    """As vocabulary_parallel_cross_entropy of hidden weight^T, with no logits held: two numbers a
    token travel and are remembered. The gradient of hidden is this rank's share.
    """
    require_in_vocabulary(targets, vocab_size, noun="target", ignored=IGNORED)
    loss: Tensor = _FusedCrossEntropy.apply(
        hidden.flatten(0, -2), weight_VD, targets.flatten(), first_row, stream.heard, partial_loss
    )
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    """loss = mean(lse - l[target]), with exp(lse) the sum of exp(lse) over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        first_row: int,
        group: Any,
        partial_loss: PartialLoss,
    ) -> Tensor:
        rows_N, is_here_N = _rows_here(targets_N, first_row, len(weight_VD))
        rows_N = rows_N.where(is_here_N, -1)
        own_lse_N, own_target_N = partial_loss.forward(hidden_ND, weight_VD, rows_N)
        highest_N = over_ranks(own_lse_N, group, "max")
        sum_N, target_N = over_ranks(
            torch.stack(((own_lse_N - highest_N).exp(), own_target_N)), group
        )
        lse_N = highest_N + sum_N.log()
        counts_N = (targets_N != IGNORED).to(lse_N.dtype)
        # of no tokens the mean is NaN and its gradient nothing, as torch's own
        weights_N = counts_N / counts_N.sum().clamp(min=1)
        ctx.save_for_backward(hidden_ND, weight_VD, rows_N, lse_N, own_target_N, weights_N)
        ctx.partial_loss = partial_loss
        return ((lse_N - target_N) * counts_N).sum() / counts_N.sum()

    @staticmethod
    @without_second_derivative("the loss that is cut over the vocabulary")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *saved, weights_N = ctx.saved_tensors
        return *ctx.partial_loss.backward(*saved, gradient * weights_N), *(None,) * 4


def require_in_vocabulary(
    words: Tensor, vocab_size: int, *, noun: str, ignored: int | None = None
) -> None:
    """Raises IndexError for words that no rank has. On a GPU, which nobody waits for, and under
    torch.compile a later call raises what torch._assert_async does.
    """
    is_word = (words >= 0) & (words < vocab_size)
    if ignored is not None:
        is_word = is_word | (words == ignored)
    message = f"a {noun} is not in the vocabulary of {vocab_size} words"
    if words.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(is_word.all(), message)
    elif not is_word.all():
        raise IndexError(f"{message}: {words[~is_word][0]}")


def _rows_here(targets_N: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """The targets as rows of this rank, and which of them it has."""
    rows_N = targets_N - first_row
    return rows_N, (targets_N != IGNORED) & (rows_N >= 0) & (rows_N < num_rows)


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, first_row: int, vocab_size: int, stream: ResidualStream
) -> Tensor:
    """Mean cross-entropy in nats of logits (..., some of V), of which this rank has those from
    first_row on, against targets (...). Tokens whose target is -100 do not count.
    """
    require_in_vocabulary(targets, vocab_size, noun="target", ignored=IGNORED)
    loss: Tensor = _CrossEntropy.apply(
        logits.flatten(0, -2), targets.flatten(), first_row, stream.heard
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    """loss = mean(log Σ exp(l - m) + m - l[target]), with m, the sum and l[target] over all ranks.

    Saves the probabilities of this rank's part of the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, first_row: int, group: Any
    ) -> Tensor:
        wide = logits_NV.double() if logits_NV.dtype == torch.float64 else logits_NV.float()
        highest_N = over_ranks(wide.amax(-1), group, "max")
        rows_N, is_here_N = _rows_here(targets_N, first_row, logits_NV.shape[1])
        rows_N = rows_N.masked_fill(~is_here_N, 0)
        shifted_NV = wide - highest_N[:, None]
        target_N = shifted_NV.gather(1, rows_N[:, None])[:, 0] * is_here_N
        exp_NV = shifted_NV.exp()
        sum_N, target_N = over_ranks(torch.stack((exp_NV.sum(-1), target_N)), group)
        counts_N = (targets_N != IGNORED).to(wide.dtype)
        # of no tokens the mean is NaN and its gradient nothing, as torch's own
        weights_N = counts_N / counts_N.sum().clamp(min=1)
        probabilities_NV = (exp_NV / sum_N[:, None]).to(logits_NV.dtype)
        ctx.save_for_backward(probabilities_NV, rows_N, is_here_N, weights_N)
        return ((sum_N.log() - target_N) * counts_N).sum() / counts_N.sum()

    @staticmethod
    @without_second_derivative("the loss that is cut over the vocabulary")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities_NV, rows_N, is_here_N, weights_N = ctx.saved_tensors
        logits_grad = probabilities_NV.clone()
        hit = is_here_N[:, None].to(logits_grad.dtype)
        logits_grad.scatter_add_(1, rows_N[:, None], -hit)
        factor_N = (gradient * weights_N).to(logits_grad.dtype)
        return logits_grad.mul_(factor_N[:, None]), None, None, None
