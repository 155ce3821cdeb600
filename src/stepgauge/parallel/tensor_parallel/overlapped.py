"""Linear layers that overlap their collective with their product, for a residual stream cut by
sequence.

- Column, an all-gather before the product: the product of the rank's own rows starts at once, while
  its piece is sent to the others. The products of the other pieces follow as they arrive.
- Row, a reduce-scatter after the product: the rows for other ranks are computed first, and are sent
  while the rest is computed. The received parts are summed in one pass at the end. A compiler could
  fuse the sum into the next operation, but also delay it until the box has another turn's parts.
- Backward mirrors this. The product of the weight gradient overlaps with a reduce-scatter, so that
  the product before it need not be cut. A column's input is gathered again instead of kept.

`exchange` moves the pieces. The four functions are operators, because a compiler must not look
inside.

Legend: B batch, T sequence, D width of the stream, F features of this rank, N ranks, Q = T/N.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.autograd.first_derivatives import without_second_derivative
from stepgauge.parallel.autograd.operators import define_operator
from stepgauge.parallel.communication.groups_by_name import group_named
from stepgauge.parallel.tensor_parallel.exchange import (
    Exchange,
    Gather,
    Scatter,
    exchange_of,
    rows_of,
)
from stepgauge.spec.plan.tensor import grouped


def gathered_product(x_BQD: Tensor, weight_FD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns y_BTF = x_BTD weightᵀ, where x_BTD is gathered from the x_BQD of all ranks. The group
    must be known to `groups_by_name.register`.
    """
    return _Column.apply(x_BQD, weight_FD, group.group_name)


def scattered_product(x_BTF: Tensor, weight_DF: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns y_BQD, this rank's piece of the sum over ranks of x_BTF weightᵀ."""
    return _Row.apply(x_BTF, weight_DF, group.group_name)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(x_BQD: Tensor, weight_FD: Tensor, group: str) -> Tensor:
        return column_forward(x_BQD, weight_FD, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_BQD, weight_FD, ctx.group = inputs
        ctx.save_for_backward(x_BQD, weight_FD)

    @staticmethod
    @without_second_derivative("a layer that overlaps")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_BQD, weight_FD = ctx.saved_tensors
        wants = ctx.needs_input_grad[1]
        x, weight = column_backward(gradient, x_BQD, weight_FD, wants, ctx.group)
        return x, weight if wants else None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(x_BTF: Tensor, weight_DF: Tensor, group: str) -> Tensor:
        return row_forward(x_BTF, weight_DF, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_BTF, weight_DF, ctx.group = inputs
        ctx.save_for_backward(x_BTF, weight_DF)

    @staticmethod
    @without_second_derivative("a layer that overlaps")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_BTF, weight_DF = ctx.saved_tensors
        wants = ctx.needs_input_grad[1]
        x, weight = row_backward(gradient, x_BTF, weight_DF, wants, ctx.group)
        return x, weight if wants else None, None


def _column_forward(x_BQD: Tensor, weight_FD: Tensor, group: str) -> Tensor:
    """Returns y_BTF."""
    exchange = _exchange_for(x_BQD, group, x_BQD.shape[2], ranks=group_named(group).size())
    y_BTF = _fake_column_forward(x_BQD, weight_FD, group)
    gather = Gather(exchange, x_BQD, keeps_own=False)
    _multiply_gathered(exchange, gather, x_BQD, weight_FD.t(), y_BTF)
    return y_BTF


def _column_backward(
    gradient_BTF: Tensor, x_BQD: Tensor, weight_FD: Tensor, wants_weight: bool, group: str
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of this rank's piece of x and of the weight (empty unless wanted)."""
    exchange = _exchange_for(x_BQD, group, x_BQD.shape[2], ranks=group_named(group).size())
    weight_gradient = weight_FD.new_empty(weight_FD.shape if wants_weight else 0)
    if not wants_weight:
        return _multiply_scattered(exchange, gradient_BTF, weight_FD), weight_gradient
    scatter = Scatter(exchange, _shape(gradient_BTF, weight_FD), x_BQD)
    gather = Gather(exchange, x_BQD, keeps_own=True)
    # One product for all ranks: the transfer overlaps with the product of the weight gradient.
    torch.mm(gradient_BTF.flatten(0, 1), weight_FD, out=scatter.whole.flatten(0, 1))
    gather.send()
    scatter.send(*exchange.receivers)
    _multiply_rows(gradient_BTF, gather.whole(), out=weight_gradient)
    return scatter.sum(), weight_gradient


def _row_forward(x_BTF: Tensor, weight_DF: Tensor, group: str) -> Tensor:
    """Returns y_BQD."""
    exchange = _exchange_for(x_BTF, group, weight_DF.shape[0])
    return _multiply_scattered(exchange, x_BTF, weight_DF.t())


def _row_backward(
    gradient_BQD: Tensor, x_BTF: Tensor, weight_DF: Tensor, wants_weight: bool, group: str
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight (empty unless wanted)."""
    exchange = _exchange_for(x_BTF, group, weight_DF.shape[0])
    x_gradient, weight_gradient = _fake_row_backward(
        gradient_BQD, x_BTF, weight_DF, wants_weight, group
    )
    gather = Gather(exchange, gradient_BQD, keeps_own=wants_weight)
    _multiply_gathered(exchange, gather, gradient_BQD, weight_DF, x_gradient)
    if wants_weight:
        _multiply_rows(gather.whole(), x_BTF, out=weight_gradient)
    return x_gradient, weight_gradient


def _fake_column_forward(x_BQD: Tensor, weight_FD: Tensor, group: str) -> Tensor:
    batch, length, _ = x_BQD.shape
    return x_BQD.new_empty((batch, group_named(group).size() * length, weight_FD.shape[0]))


def _fake_column_backward(
    gradient_BTF: Tensor, x_BQD: Tensor, weight_FD: Tensor, wants_weight: bool, group: str
) -> tuple[Tensor, Tensor]:
    weight = weight_FD.new_empty(weight_FD.shape if wants_weight else 0)
    return x_BQD.new_empty(x_BQD.shape), weight


def _fake_row_forward(x_BTF: Tensor, weight_DF: Tensor, group: str) -> Tensor:
    batch, length, _ = x_BTF.shape
    return x_BTF.new_empty((batch, length // group_named(group).size(), weight_DF.shape[0]))


def _fake_row_backward(
    gradient_BQD: Tensor, x_BTF: Tensor, weight_DF: Tensor, wants_weight: bool, group: str
) -> tuple[Tensor, Tensor]:
    weight = weight_DF.new_empty(weight_DF.shape if wants_weight else 0)
    return x_BTF.new_empty(x_BTF.shape), weight


column_forward = define_operator(
    "column_forward",
    "(Tensor x, Tensor weight, str group) -> Tensor",
    _column_forward,
    _fake_column_forward,
)
column_backward = define_operator(
    "column_backward",
    "(Tensor gradient, Tensor x, Tensor weight, bool wants_weight, str group) -> (Tensor, Tensor)",
    _column_backward,
    _fake_column_backward,
)
row_forward = define_operator(
    "row_forward",
    "(Tensor x, Tensor weight, str group) -> Tensor",
    _row_forward,
    _fake_row_forward,
)
row_backward = define_operator(
    "row_backward",
    "(Tensor gradient, Tensor x, Tensor weight, bool wants_weight, str group) -> (Tensor, Tensor)",
    _row_backward,
    _fake_row_backward,
)


def _multiply_gathered(
    exchange: Exchange, gather: Gather, own_BQD: Tensor, matrix: Tensor, out_BTF: Tensor
) -> None:
    """Writes x_BTD matrix to out_BTF: this rank's rows first, then the others' as they arrive."""
    ranks = exchange.ranks
    _multiply(own_BQD, matrix, out=rows_of(out_BTF, exchange.rank, ranks))
    gather.send()
    for group in _groups(exchange.senders, rows=own_BQD.shape[0] * own_BQD.shape[1]):
        _multiply(gather.pieces(group), matrix, out=rows_of(out_BTF, group, ranks))


def _multiply_scattered(exchange: Exchange, x_BTF: Tensor, matrix: Tensor) -> Tensor:
    """Returns this rank's rows of the sum over ranks of x matrix. Computes the rows for the other
    ranks first, and sends them while the rest is computed.
    """
    scatter, ranks = Scatter(exchange, _shape(x_BTF, matrix), x_BTF), exchange.ranks
    for group in _groups(exchange.receivers, rows=x_BTF.shape[0] * x_BTF.shape[1] // ranks):
        _multiply(rows_of(x_BTF, group, ranks), matrix, out=rows_of(scatter.whole, group, ranks))
        scatter.send(*group)
    own = exchange.rank
    _multiply(rows_of(x_BTF, own, ranks), matrix, out=rows_of(scatter.whole, own, ranks))
    return scatter.sum()


def _groups(ranks: list[int], rows: int) -> list[range]:
    captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return grouped(ranks, rows=rows, replayed=captures)


def _multiply(rows_BQK: Tensor, matrix_KM: Tensor, *, out: Tensor) -> None:
    """Computes a batched product, which reads and writes the rows of every sequence in place."""
    torch.bmm(rows_BQK, matrix_KM.expand(len(rows_BQK), -1, -1), out=out)


def _multiply_rows(left_BTK: Tensor, right_BTM: Tensor, *, out: Tensor) -> None:
    """Computes out_KM = leftᵀ right, a sum over all tokens."""
    torch.mm(left_BTK.flatten(0, 1).t(), right_BTM.flatten(0, 1), out=out)


def _shape(x_BTK: Tensor, matrix_KM: Tensor) -> tuple[int, int, int]:
    """Returns the shape of the product."""
    return x_BTK.shape[0], x_BTK.shape[1], matrix_KM.shape[1]


def _exchange_for(x: Tensor, group: str, width: int, *, ranks: int = 1) -> Exchange:
    """Returns an exchange with room for x_BTD of that width, where x has all rows or, with `ranks`,
    the rows of one of so many ranks.
    """
    return exchange_of(group, x.device, x.shape[0] * x.shape[1] * ranks * width * x.dtype.itemsize)
