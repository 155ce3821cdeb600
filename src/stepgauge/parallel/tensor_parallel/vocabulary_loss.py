"""Cross-entropy with the vocabulary cut over ranks.

Legend: N tokens, D model width, V rows of the vocabulary on this rank.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepgauge.parallel.autograd.first_derivatives import without_second_derivative
from stepgauge.parallel.communication.graph_collectives import over_ranks
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream
from stepgauge.spec.plan.tensor import MOST_COPIED_LOGITS

IGNORED = -100  # target of a token that does not count, as in F.cross_entropy


@dataclasses.dataclass(frozen=True)
class PartialLoss:
    """A fused linear layer and cross-entropy over a part of the vocabulary. The results of all parts
    can be combined into the loss over the whole vocabulary.

    forward   (hidden_ND, weight_VD, rows_N) -> lse_N, target_N: the log-sum-exp of the part's
              logits, and the logit of the target. rows_N is the target's row in the weight, -1 if
              the part does not have it
    backward  (hidden_ND, weight_VD, rows_N, lse_N, target_N, factor_N) -> the gradients of hidden
              and weight for the loss Σ factor · (lse - target), where lse is that of the whole
              vocabulary
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
    """Returns vocabulary_parallel_cross_entropy of the logits hidden weightᵀ, without holding them:
    ranks exchange and save two numbers per token. The gradient of hidden is this rank's summand.
    """
    require_in_vocabulary(targets, vocab_size, noun="target", ignored=IGNORED)
    loss: Tensor = _FusedCrossEntropy.apply(
        hidden.flatten(0, -2),
        weight_VD,
        targets.flatten(),
        first_row,
        stream.active_group,
        partial_loss,
    )
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    """loss = mean(lse - l[target]), where exp(lse) is the sum over ranks of exp(lse of the rank)."""

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
        rows_N, is_local_N = _local_rows(targets_N, first_row, len(weight_VD))
        rows_N = rows_N.where(is_local_N, -1)
        local_lse_N, local_target_N = partial_loss.forward(hidden_ND, weight_VD, rows_N)
        max_N = over_ranks(local_lse_N, group, "max")
        sum_N, target_N = over_ranks(
            torch.stack(((local_lse_N - max_N).exp(), local_target_N)), group
        )
        lse_N = max_N + sum_N.log()
        counts_N, weights_N = _mean_weights(targets_N, lse_N.dtype)
        ctx.save_for_backward(hidden_ND, weight_VD, rows_N, lse_N, local_target_N, weights_N)
        ctx.partial_loss = partial_loss
        return ((lse_N - target_N) * counts_N).sum() / counts_N.sum()

    @staticmethod
    @without_second_derivative("the vocabulary-parallel loss")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *saved, weights_N = ctx.saved_tensors
        return *ctx.partial_loss.backward(*saved, gradient * weights_N), *(None,) * 4


def require_in_vocabulary(
    words: Tensor, vocab_size: int, *, noun: str, ignored: int | None = None
) -> None:
    """Raises IndexError for words outside the vocabulary.

    On a GPU and under torch.compile the check is asynchronous, to avoid a synchronization: a later
    call then raises the error of torch._assert_async.
    """
    is_word = (words >= 0) & (words < vocab_size)
    if ignored is not None:
        is_word = is_word | (words == ignored)
    message = f"a {noun} is not in the vocabulary of {vocab_size} words"
    if words.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(is_word.all(), message)
    elif not is_word.all():
        raise IndexError(f"{message}: {words[~is_word][0]}")


def _local_rows(targets_N: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns the targets as rows of this rank's weight, and a mask of those that it has."""
    rows_N = targets_N - first_row
    return rows_N, (targets_N != IGNORED) & (rows_N >= 0) & (rows_N < num_rows)


def _mean_weights(targets_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns 1 for each token that counts, else 0, and the weights of tokens in the gradient of the
    mean. If no token counts, the mean is NaN and its gradient zero, as in F.cross_entropy.
    """
    counts_N = (targets_N != IGNORED).to(dtype)
    return counts_N, counts_N / counts_N.sum().clamp(min=1)


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    first_row: int,
    vocab_size: int,
    stream: ResidualStream,
    may_rule_out: bool = True,
) -> Tensor:
    """Returns the mean cross-entropy in nats. `logits` (..., V) are those of this rank's rows of the
    vocabulary, which start at first_row; `targets` (...) are words. Targets of -100 do not count.

    may_rule_out  logits of -inf may rule out all words of this rank for a token. False, as without a bias,
                  saves a pass over the gradient
    """
    require_in_vocabulary(targets, vocab_size, noun="target", ignored=IGNORED)
    loss: Tensor = _CrossEntropy.apply(
        logits.flatten(0, -2), targets.flatten(), first_row, stream.active_group, may_rule_out
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    """loss = mean(m + log Σ exp(l - m) - l[target]), where the maximum m, the sum and l[target] are over
    all ranks. Backward computes probabilities again, so that only the logits are kept.

    Passes over the logits are those of a softmax over this rank's words. If t is the largest of them, and p its
    probability among them, their part of the sum is exp(t - m) / p. Among all words, this rank's
    probabilities are smaller by its share of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        first_row: int,
        group: Any,
        may_rule_out: bool = True,
    ) -> Tensor:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        rows_N, is_local_N = _local_rows(targets_N, first_row, logits_NV.shape[1])
        rows_N = rows_N.masked_fill(~is_local_N, 0)
        top_N, top_row_N = logits_NV.detach().max(-1)
        log_p_N = _log_probabilities(logits_NV, top_row_N, dtype)
        top_N = top_N.to(dtype)
        max_N = over_ranks(top_N, group, "max")
        ruled_out_N = top_N == -torch.inf  # all words of this rank
        log_sum_N = (top_N - max_N - log_p_N).masked_fill(ruled_out_N, -torch.inf)
        target_N = (_of_row(logits_NV, rows_N).to(dtype) - max_N).where(is_local_N, 0.0)
        # Do not use what is stacked again: torch.compile's inductor sums over ranks in place.
        sum_N, target_N = over_ranks(torch.stack((log_sum_N.exp(), target_N)), group)
        share_N = (log_sum_N - sum_N.log()).exp()
        counts_N, weights_N = _mean_weights(targets_N, dtype)
        ctx.save_for_backward(logits_NV, rows_N, is_local_N, share_N, weights_N)
        ctx.ruled_out_N = ruled_out_N if may_rule_out else None
        return ((sum_N.log() - target_N) * counts_N).sum() / counts_N.sum()

    @staticmethod
    @without_second_derivative("the vocabulary-parallel loss")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, rows_N, is_local_N, share_N, weights_N = ctx.saved_tensors
        factor_N = gradient * weights_N
        logits_grad = logits_NV.softmax(-1).mul_((share_N * factor_N)[:, None])
        if ctx.ruled_out_N is not None:
            logits_grad.masked_fill_(ctx.ruled_out_N[:, None], 0.0)
        hit_N = (factor_N * is_local_N).to(logits_grad.dtype)
        logits_grad.scatter_add_(1, rows_N[:, None], -hit_N[:, None])
        return logits_grad, None, None, None, None


def _log_probabilities(logits_NV: Tensor, rows_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the logarithm of each token's probability of one row. Few logits are copied to `dtype` at a time."""
    tokens = max(1, MOST_COPIED_LOGITS // logits_NV.shape[1])
    parts = zip(logits_NV.split(tokens), rows_N.split(tokens), strict=True)
    return torch.cat([_of_row(part.log_softmax(-1, dtype), rows) for part, rows in parts])


def _of_row(x_NV: Tensor, rows_N: Tensor) -> Tensor:
    return x_NV.gather(1, rows_N[:, None])[:, 0]
