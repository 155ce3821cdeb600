"""The layers of a tensor parallel network: each rank has a part of the weight.

Legend: B batch, T sequence, D model width, F features of all ranks, V vocabulary, N tokens of the
batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgauge.parallel.tensor_parallel.layer_types import is_transposed
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream
from stepgauge.parallel.tensor_parallel.vocabulary_loss import (
    PartialLoss,
    fused_vocabulary_parallel_cross_entropy,
    require_in_vocabulary,
    vocabulary_parallel_cross_entropy,
)


class _CutLinear(nn.Module):
    """The parameters of a linear layer as they are stored: a state has the shapes of the layer's."""

    def __init__(self, layer: Any, stream: ResidualStream):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.stream, self.is_transposed = stream, is_transposed(layer)

    def rows_by_outputs(self) -> Tensor:
        """weight_FD, whichever way it is stored."""
        return self.weight.t() if self.is_transposed else self.weight


class ColumnParallelLinear(_CutLinear):
    """Some rows of a linear layer: all of the input in, some of the features out.

    sections  rows that this rank has of each of the layers that are fused here
    gathers   False: its input is gathered already, for several columns at once
    """

    def __init__(self, layer: Any, stream: ResidualStream, sections: tuple[int, ...]):
        super().__init__(layer, stream)
        self.sections = sections
        self.gathers = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.gathers:
            return F.linear(x, self.rows_by_outputs(), self.bias)
        return self.stream.entering(as_computed(x), self.rows_by_outputs(), self.bias)


class RowParallelLinear(_CutLinear):
    """Some columns of a linear layer: some of the features in, all of the output out, summed over
    ranks. The bias is added once, after the sum.
    """

    def forward(self, x_BTF: Tensor) -> Tensor:
        y = self.stream.leaving(as_computed(x_BTF), self.rows_by_outputs())
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabularyParallelEmbedding(nn.Module):
    """Some rows of an embedding; the output is whole on every rank."""

    def __init__(
        self, layer: nn.Embedding, stream: ResidualStream, first_row: int, vocab_size: int
    ):
        super().__init__()
        self.weight, self.stream = layer.weight, stream
        self.first_row, self.vocab_size = first_row, vocab_size
        self.padding_row: int | None = None  # of this rank's rows, the one without a gradient
        if layer.padding_idx is not None and 0 <= layer.padding_idx - first_row < len(self.weight):
            self.padding_row = layer.padding_idx - first_row

    def forward(self, tokens_BT: Tensor) -> Tensor:
        require_in_vocabulary(tokens_BT, self.vocab_size, noun="token")
        rows_BT = tokens_BT - self.first_row
        elsewhere_BT = (rows_BT < 0) | (rows_BT >= self.weight.shape[0])
        x_BTD = F.embedding(
            rows_BT.masked_fill(elsewhere_BT, 0), self.weight, padding_idx=self.padding_row
        )
        return self.stream.sum(x_BTD.masked_fill(elsewhere_BT[..., None], 0.0))


class VocabularyParallelHead(nn.Module):
    """Some rows of the output matrix. Called, it gives the logits of the whole vocabulary; `loss`
    never holds them, and with a `partial_loss` not those of its rows either.
    """

    def __init__(self, layer: nn.Linear, stream: ResidualStream, first_row: int, vocab_size: int):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.stream, self.first_row, self.vocab_size = stream, first_row, vocab_size
        self.partial_loss: PartialLoss | None = None

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(self.stream.enter(as_computed(x)), self.weight, self.bias)
        last = self.vocab_size - self.first_row - self.weight.shape[0]
        return self.stream.sum(F.pad(logits, (self.first_row, last)))

    def loss(
        self, x: Tensor, weight_VD: Tensor, targets_BT: Tensor, bias_V: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy; the weight is this layer's, given as any loss of a model gets it. A
        bias needs the logits of this rank's rows.
        """
        whole = self.stream.enter(as_computed(x))
        if self.partial_loss is not None and bias_V is None:
            return fused_vocabulary_parallel_cross_entropy(
                whole,
                as_computed(weight_VD),
                targets_BT,
                first_row=self.first_row,
                vocab_size=self.vocab_size,
                stream=self.stream,
                partial_loss=self.partial_loss,
            )
        logits = F.linear(whole, weight_VD, bias_V)
        return vocabulary_parallel_cross_entropy(
            logits,
            targets_BT,
            first_row=self.first_row,
            vocab_size=self.vocab_size,
            stream=self.stream,
        )


def as_computed(x: Tensor) -> Tensor:
    """x in the type that a linear layer would cast it to, so that it travels in that type."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x
