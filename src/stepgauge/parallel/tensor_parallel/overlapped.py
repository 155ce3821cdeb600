"""Linear layers that overlap their collective with their product, for a residual stream that is cut
over ranks.

- Column, an all-gather before the product: the product of the rank's own rows starts at once, while
  they are sent to the others. The products of the others' rows follow as they arrive.
- Row, a reduce-scatter after the product: the rows for other ranks are computed first, and are sent
  while the rest is computed. The received parts are summed in one pass at the end. A compiler could
  fuse the sum into the next operation, but also delay it until the box has another turn's parts.
- Backward mirrors this. The product of the weight gradient overlaps with a reduce-scatter, so that
  the product before it need not be cut. A column's input is gathered again instead of kept.

`exchange` moves the rows. The four functions are operators, because a compiler must not look
inside.

Tensors may have more dims than two: dim 0 is cut, and all but the last are rows. The operators flatten them,
so that an input that is not contiguous is kept for backward as it is.

Legend: N ranks, R rows (tokens) of a rank, S = N R rows of all, D width of the stream, F features of
this rank.
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


def gathered_product(x_RD: Tensor, weight_FD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns y_SF = x_SD weightᵀ, where x_SD is gathered from the x_RD of all ranks. The group
    must be known to `groups_by_name.register`.
    """
    return _Column.apply(x_RD, weight_FD, group.group_name)


def scattered_product(x_SF: Tensor, weight_DF: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns y_RD, this rank's rows of the sum over ranks of x_SF weightᵀ."""
    return _Row.apply(x_SF, weight_DF, group.group_name)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FD: Tensor, group: str) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight_FD)
        return column_forward(x, weight_FD, group)

    @staticmethod
    @without_second_derivative("a layer that overlaps")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wants = ctx.needs_input_grad[1]
        x, weight = column_backward(gradient, *ctx.saved_tensors, wants, ctx.group)
        return x, weight if wants else None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_DF: Tensor, group: str) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight_DF)
        return row_forward(x, weight_DF, group)

    @staticmethod
    @without_second_derivative("a layer that overlaps")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wants = ctx.needs_input_grad[1]
        x, weight = row_backward(gradient, *ctx.saved_tensors, wants, ctx.group)
        return x, weight if wants else None, None


def _column_forward(x: Tensor, weight_FD: Tensor, group: str) -> Tensor:
    """Returns y_SF."""
    x_RD, y = x.flatten(0, -2), _fake_column_forward(x, weight_FD, group)
    exchange = _exchange_for(x_RD, group, x_RD.shape[1], ranks=group_named(group).size())
    gather = Gather(exchange, x_RD, keeps_own=False)
    _multiply_gathered(exchange, gather, x_RD, weight_FD.t(), y.flatten(0, -2))
    return y


def _column_backward(
    gradient: Tensor, x: Tensor, weight_FD: Tensor, wants_weight: bool, group: str
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of this rank's rows of x and of the weight (empty unless wanted)."""
    # If memory for a copy runs out, it must be before a turn begins.
    x_RD, gradient_SF = x.flatten(0, -2).contiguous(), gradient.flatten(0, -2)
    exchange = _exchange_for(x_RD, group, x_RD.shape[1], ranks=group_named(group).size())
    weight_gradient = weight_FD.new_empty(weight_FD.shape if wants_weight else 0)
    if not wants_weight:
        return _multiply_scattered(exchange, gradient_SF, weight_FD).view(x.shape), weight_gradient
    scatter = Scatter(exchange, (gradient_SF.shape[0], weight_FD.shape[1]), x_RD)
    gather = Gather(exchange, x_RD, keeps_own=True)
    # One product for all ranks: the transfer overlaps with the product of the weight gradient.
    torch.mm(gradient_SF, weight_FD, out=scatter.whole)
    gather.send()
    scatter.send(*exchange.receivers)
    torch.mm(gradient_SF.t(), gather.whole(), out=weight_gradient)
    return scatter.sum().view(x.shape), weight_gradient


def _row_forward(x: Tensor, weight_DF: Tensor, group: str) -> Tensor:
    """Returns y_RD."""
    x_SF = x.flatten(0, -2)
    exchange = _exchange_for(x_SF, group, weight_DF.shape[0])
    y_RD = _multiply_scattered(exchange, x_SF, weight_DF.t())
    return y_RD.view(x.shape[0] // exchange.ranks, *x.shape[1:-1], -1)


def _row_backward(
    gradient: Tensor, x: Tensor, weight_DF: Tensor, wants_weight: bool, group: str
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight (empty unless wanted)."""
    gradient_RD, x_SF = gradient.flatten(0, -2), x.flatten(0, -2)
    exchange = _exchange_for(x_SF, group, weight_DF.shape[0])
    x_gradient, weight_gradient = _fake_row_backward(gradient, x, weight_DF, wants_weight, group)
    gather = Gather(exchange, gradient_RD, keeps_own=wants_weight)
    _multiply_gathered(exchange, gather, gradient_RD, weight_DF, x_gradient.flatten(0, -2))
    if wants_weight:
        torch.mm(gather.whole().t(), x_SF, out=weight_gradient)
    return x_gradient, weight_gradient


def _fake_column_forward(x: Tensor, weight_FD: Tensor, group: str) -> Tensor:
    ranks = group_named(group).size()
    return x.new_empty((ranks * x.shape[0], *x.shape[1:-1], weight_FD.shape[0]))


def _fake_column_backward(
    gradient: Tensor, x: Tensor, weight_FD: Tensor, wants_weight: bool, group: str
) -> tuple[Tensor, Tensor]:
    weight = weight_FD.new_empty(weight_FD.shape if wants_weight else 0)
    return x.new_empty(x.shape), weight


def _fake_row_forward(x: Tensor, weight_DF: Tensor, group: str) -> Tensor:
    ranks = group_named(group).size()
    return x.new_empty((x.shape[0] // ranks, *x.shape[1:-1], weight_DF.shape[0]))


def _fake_row_backward(
    gradient: Tensor, x: Tensor, weight_DF: Tensor, wants_weight: bool, group: str
) -> tuple[Tensor, Tensor]:
    weight = weight_DF.new_empty(weight_DF.shape if wants_weight else 0)
    return x.new_empty(x.shape), weight


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
    exchange: Exchange, gather: Gather, own_RD: Tensor, matrix: Tensor, out_SF: Tensor
) -> None:
    """Writes x_SD matrix to out_SF: this rank's rows first, then the others' as they arrive."""
    ranks = exchange.ranks
    torch.mm(own_RD, matrix, out=rows_of(out_SF, exchange.rank, ranks))
    gather.send()
    for group in _groups(exchange.senders, rows=own_RD.shape[0]):
        torch.mm(gather.rows(group), matrix, out=rows_of(out_SF, group, ranks))


def _multiply_scattered(exchange: Exchange, x_SF: Tensor, matrix: Tensor) -> Tensor:
    """Returns this rank's rows of the sum over ranks of x matrix. Computes the rows for the other
    ranks first, and sends them while the rest is computed.
    """
    scatter = Scatter(exchange, (x_SF.shape[0], matrix.shape[1]), x_SF)
    own, ranks = exchange.rank, exchange.ranks
    for group in _groups(exchange.receivers, rows=x_SF.shape[0] // ranks):
        torch.mm(rows_of(x_SF, group, ranks), matrix, out=rows_of(scatter.whole, group, ranks))
        scatter.send(*group)
    torch.mm(rows_of(x_SF, own, ranks), matrix, out=rows_of(scatter.whole, own, ranks))
    return scatter.sum()


def _groups(ranks: list[int], rows: int) -> list[range]:
    captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return grouped(ranks, rows=rows, replayed=captures)


def _exchange_for(x: Tensor, group: str, width: int, *, ranks: int = 1) -> Exchange:
    """Returns an exchange with room for x_SD of that width, where x has all rows or, with `ranks`, the
    rows of one of so many ranks.
    """
    return exchange_of(group, x.device, x.shape[0] * ranks * width * x.dtype.itemsize)
