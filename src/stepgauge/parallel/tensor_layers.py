"""The layers of a tensor parallel network: each rank has a part of the weight.

Legend: B batch, T sequence, D model width, F features of all ranks, V vocabulary, N tokens of the
batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgauge.parallel.residual_stream import ResidualStream, all_reduce

IGNORED = -100  # the target of a token that does not count, as in F.cross_entropy


class ColumnParallelLinear(nn.Module):
    """Some rows of a linear layer: all of the input in, some of the features out.

    sections  rows that this rank has of each of the layers that are fused here
    """

    def __init__(self, layer: nn.Linear, stream: ResidualStream, sections: tuple[int, ...]):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.stream, self.sections = stream, sections

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.stream.enter(as_computed(x)), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Some columns of a linear layer: some of the features in, all of the output out, summed over
    ranks. The bias is added once, after the sum.
    """

    def __init__(self, layer: nn.Linear, stream: ResidualStream):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.stream = stream

    def forward(self, x_BTF: Tensor) -> Tensor:
        y = self.stream.leave(F.linear(x_BTF, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabularyParallelEmbedding(nn.Module):
    """Some rows of an embedding; the output is whole on every rank."""

    def __init__(self, layer: nn.Embedding, stream: ResidualStream, first_row: int):
        super().__init__()
        self.weight, self.stream, self.first_row = layer.weight, stream, first_row

    def forward(self, tokens_BT: Tensor) -> Tensor:
        rows_BT = tokens_BT - self.first_row
        elsewhere_BT = (rows_BT < 0) | (rows_BT >= self.weight.shape[0])
        x_BTD = F.embedding(rows_BT.masked_fill(elsewhere_BT, 0), self.weight)
        return self.stream.sum(x_BTD.masked_fill(elsewhere_BT[..., None], 0.0))


class VocabularyParallelHead(nn.Module):
    """Some rows of the output matrix. Called, it gives the logits of the whole vocabulary; `loss`
    never holds them.
    """

    def __init__(self, layer: nn.Linear, stream: ResidualStream, first_row: int, vocab_size: int):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.stream, self.first_row, self.vocab_size = stream, first_row, vocab_size

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(self.stream.enter(as_computed(x)), self.weight, self.bias)
        last = self.vocab_size - self.first_row - self.weight.shape[0]
        return self.stream.sum(F.pad(logits, (self.first_row, last)))

    def loss(
        self, x: Tensor, weight_VD: Tensor, targets_BT: Tensor, bias_V: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy; the weight is this layer's, given as any loss of a model gets it."""
        logits = F.linear(self.stream.enter(as_computed(x)), weight_VD, bias_V)
        return vocabulary_parallel_cross_entropy(
            logits, targets_BT, first_row=self.first_row, stream=self.stream
        )


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, first_row: int, stream: ResidualStream
) -> Tensor:
    """Mean cross-entropy in nats of logits (..., some of V), of which this rank has those from
    first_row on, against targets (...). Tokens whose target is -100 do not count.
    """
    loss: Tensor = _CrossEntropy.apply(
        logits.flatten(0, -2), targets.flatten(), first_row, stream.group
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
        highest_N = all_reduce(wide.amax(-1), group, "max")
        rows_N = targets_N - first_row
        is_here_N = (rows_N >= 0) & (rows_N < logits_NV.shape[1])
        rows_N = rows_N.masked_fill(~is_here_N, 0)
        shifted_NV = wide - highest_N[:, None]
        target_N = shifted_NV.gather(1, rows_N[:, None])[:, 0] * is_here_N
        exp_NV = shifted_NV.exp()
        sum_N, target_N = all_reduce(torch.stack((exp_NV.sum(-1), target_N)), group)
        counts_N = (targets_N != IGNORED).to(wide.dtype)
        share = 1.0 / counts_N.sum()
        probabilities_NV = (exp_NV / sum_N[:, None]).to(logits_NV.dtype)
        ctx.save_for_backward(probabilities_NV, rows_N, is_here_N, counts_N * share)
        return ((sum_N.log() - target_N) * counts_N).sum() * share

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities_NV, rows_N, is_here_N, weights_N = ctx.saved_tensors
        logits_grad = probabilities_NV.clone()
        hit = is_here_N[:, None].to(logits_grad.dtype)
        logits_grad.scatter_add_(1, rows_N[:, None], -hit)
        factor_N = (gradient * weights_N).to(logits_grad.dtype)
        return logits_grad.mul_(factor_N[:, None]), None, None, None


def as_computed(x: Tensor) -> Tensor:
    """x in the type that a linear layer would cast it to, so that it travels in that type."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x
