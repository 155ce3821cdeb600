"""The layers of a tensor-parallel network. Each rank has a part of the weight.

Legend: B batch, T sequence, D model width, F features of a rank, V rows of the vocabulary on a rank.
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
    """Holds the parameters of a linear layer in their stored shape, so that a state dict keeps it."""

    def __init__(self, layer: Any, stream: ResidualStream):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.stream, self.is_transposed = stream, is_transposed(layer)

    @property
    def weight_by_outputs(self) -> Tensor:
        """The weight as (outputs, inputs), whichever way it is stored."""
        return self.weight.t() if self.is_transposed else self.weight


class ColumnParallelLinear(_CutLinear):
    """A linear layer with some rows of the weight on each rank: takes the whole input, returns some
    of the features.

    sections  rows of this rank in each section of the weight, for layers that are fused into one
    gathers   False: the module around it has gathered the input, once for several layers
    """

    def __init__(self, layer: Any, stream: ResidualStream, sections: tuple[int, ...]):
        super().__init__(layer, stream)
        self.sections = sections
        self.gathers = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.gathers:
            return F.linear(x, self.weight_by_outputs, self.bias)
        return self.stream.column_linear(to_compute_dtype(x), self.weight_by_outputs, self.bias)


class RowParallelLinear(_CutLinear):
    """A linear layer with some columns of the weight on each rank: takes some of the features,
    returns the whole output, summed over ranks. The bias is added once, after the sum.
    """

    def forward(self, x_BTF: Tensor) -> Tensor:
        y = self.stream.row_linear(to_compute_dtype(x_BTF), self.weight_by_outputs)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabularyParallelEmbedding(nn.Module):
    """An embedding with some rows on each rank; the output is whole on every rank.

    first_row    token of this rank's first row
    padding_row  this rank's row that gets no gradient, if it has it
    """

    def __init__(
        self, layer: nn.Embedding, stream: ResidualStream, first_row: int, vocab_size: int
    ):
        super().__init__()
        self.weight, self.stream = layer.weight, stream
        self.first_row, self.vocab_size = first_row, vocab_size
        self.padding_row: int | None = None
        if layer.padding_idx is not None and 0 <= layer.padding_idx - first_row < len(self.weight):
            self.padding_row = layer.padding_idx - first_row

    def forward(self, tokens_BT: Tensor) -> Tensor:
        require_in_vocabulary(tokens_BT, self.vocab_size, noun="token")
        rows_BT, num_rows = tokens_BT - self.first_row, self.weight.shape[0]
        elsewhere_BT = (rows_BT < 0) | (rows_BT >= num_rows)
        x_BTD = F.embedding(rows_BT.remainder(num_rows), self.weight, padding_idx=self.padding_row)
        if not self.stream.communicates:  # this rank's words take the place of the others'
            return x_BTD
        return self.stream.sum(x_BTD.masked_fill(elsewhere_BT[..., None], 0.0))


class VocabularyParallelHead(nn.Module):
    """The output matrix, with some rows on each rank. forward returns the logits of the whole
    vocabulary. `loss` only needs those of this rank's rows, and with `partial_loss` not even these.
    """

    def __init__(self, layer: nn.Linear, stream: ResidualStream, first_row: int, vocab_size: int):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.stream, self.first_row, self.vocab_size = stream, first_row, vocab_size
        self.partial_loss: PartialLoss | None = None

    def forward(self, x: Tensor) -> Tensor:
        x_BTD = self.stream.gather_input(to_compute_dtype(x))
        logits_BTV = F.linear(x_BTD, self.weight, self.bias)
        rows_after = self.vocab_size - self.first_row - self.weight.shape[0]
        return self.stream.sum(F.pad(logits_BTV, (self.first_row, rows_after)))

    def loss(
        self, x: Tensor, weight_VD: Tensor, targets_BT: Tensor, bias_V: Tensor | None = None
    ) -> Tensor:
        """Returns the mean cross-entropy. weight_VD is this layer's weight, passed because the loss
        function of a model takes it. With a bias the logits of this rank's rows are held.
        """
        x_BTD = self.stream.gather_input(to_compute_dtype(x))
        if self.partial_loss is not None and bias_V is None:
            return fused_vocabulary_parallel_cross_entropy(
                x_BTD,
                to_compute_dtype(weight_VD),
                targets_BT,
                first_row=self.first_row,
                vocab_size=self.vocab_size,
                stream=self.stream,
                partial_loss=self.partial_loss,
            )
        return vocabulary_parallel_cross_entropy(
            F.linear(x_BTD, weight_VD, bias_V),
            targets_BT,
            first_row=self.first_row,
            vocab_size=self.vocab_size,
            stream=self.stream,
            may_rule_out=bias_V is not None,
        )


def to_compute_dtype(x: Tensor) -> Tensor:
    """Casts x to the dtype in which autocast runs a linear layer, so that it is sent in that dtype."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x
