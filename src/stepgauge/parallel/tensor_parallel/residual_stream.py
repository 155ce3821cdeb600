"""The collectives around the residual stream of a tensor-parallel network.

The path of an activation through a block, with the stream cut over ranks (by_sequence=True):

    x_BQD  each rank's piece of the tokens; norms and residual additions work on it
      all-gather            gather_input, or column_linear with the layer
    x_BTD  all tokens
      column layer          each rank has some rows of the weight
    h_BTF  each rank's features (its heads), on which attention or the activation function works
      row layer             each rank has some columns of the weight
    y_BTD  each rank's summand of the output
      reduce-scatter        reduce_output, or row_linear with the layer
    y_BQD  each rank's piece of the sum

Backward mirrors this: the gradient of an all-gather is a reduce-scatter and vice versa. With a whole
stream (by_sequence=False) every rank has x_BTD. Forward then needs no gather and all-reduces y_BTD;
backward all-reduces the gradient of x_BTD, since each rank only knows the share of its features.

Which tokens a piece has. By sequence, rank r has positions rQ to (r+1)Q of each sequence. By token, it has
tokens rBQ to (r+1)BQ of the batch, whose sequences follow one another in memory: no copy is needed to
send or join pieces. The piece has the shape (B, Q, D) there, too, so that a module that reads shapes
finds the same; but row b of it need not belong to sequence b.

Collectives and products cut dim 0: `_rows` brings x into a shape in which rank r has the r-th part of it,
and `_gathered` and `_piece` bring results back. All collectives are followed by autograd and kept in the graph
by torch.compile.

Legend: B batch, T sequence, D model width, F features of a rank, N ranks, Q = T/N.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stepgauge.parallel.communication.graph_collectives import (
    all_gather,
    all_reduce,
    over_ranks,
    reduce_scatter,
)
from stepgauge.parallel.tensor_parallel.overlapped import gathered_product, scattered_product
from stepgauge.spec.plan.tensor import overlaps


@dataclasses.dataclass(eq=False)
class ResidualStream:
    """The collectives of one tensor-parallel group.

    by_sequence   each rank has a piece x_BQD of the stream; otherwise it has all of x_BTD
    by_token      a piece is of the batch's tokens in order, instead of each sequence's
    overlap       large collectives run at the same time as the product next to them; needs
                  by_sequence and a group known to `groups_by_name.register`
    replayed      the step is replayed from a CUDA graph, so that smaller collectives overlap
    communicates  False leaves out the collectives, to time everything else. Results then have the
                  right shape and wrong values: this rank's rows and words take the place of the others'. (With
                  zeros, gradients of norms grow by layer until they are infinite. Products of such values
                  draw less power, and a GPU at its power limit then runs faster.)
    """

    group: dist.ProcessGroup
    by_sequence: bool = True
    by_token: bool = False
    overlap: bool = False
    replayed: bool = False
    communicates: bool = True

    def __deepcopy__(self, _: Any) -> "ResidualStream":
        return dataclasses.replace(self)  # the copy keeps the process group

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def active_group(self) -> dist.ProcessGroup | None:
        """The group; None if communication is left out."""
        return self.group if self.communicates else None

    def gather_input(self, x: Tensor) -> Tensor:
        """Returns x_BTD, as the input of layers of which each rank computes a part. Backward sums
        the gradients of all ranks.
        """
        if not self.by_sequence:
            return _SumOfGradients.apply(x, self.group) if self.communicates else x
        gather = _Gather.apply if self.communicates else _repeated
        return self._gathered(gather(self._rows(x), self.group), x)

    def reduce_output(self, y_BTD: Tensor) -> Tensor:
        """Sums the ranks' summands. Returns the rank's piece y_BQD if the stream is by sequence."""
        if not self.by_sequence:
            return self.sum(y_BTD)
        self._require_divisible(y_BTD)
        reduce = _ReduceScatter.apply if self.communicates else _OwnRows.apply
        return self._piece(reduce(self._rows(y_BTD), self.group), y_BTD)

    def column_linear(self, x: Tensor, weight_FD: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns h_BTF: `gather_input`, then a linear layer with some of its rows on each rank."""
        if not self._overlaps(x, self.ranks):
            return F.linear(self.gather_input(x), weight_FD, bias)
        h = gathered_product(self._rows(x), weight_FD.to(x.dtype), self.group)
        h_BTF = self._gathered(h, x)
        return h_BTF if bias is None else h_BTF + bias.to(x.dtype)

    def row_linear(self, x_BTF: Tensor, weight_DF: Tensor) -> Tensor:
        """A linear layer with some of its columns on each rank, then `reduce_output`."""
        if not self._overlaps(x_BTF, 1, width=weight_DF.shape[0]):
            return self.reduce_output(F.linear(x_BTF, weight_DF))
        self._require_divisible(x_BTF)
        weight_DF = weight_DF.to(x_BTF.dtype)
        return self._piece(scattered_product(self._rows(x_BTF), weight_DF, self.group), x_BTF)

    def _overlaps(self, x: Tensor, pieces: int, width: int = 0) -> bool:
        """True if the collective next to a product should overlap it. The stream has `pieces` times
        the tokens of x, and `width` features (0: those of x).
        """
        if not (self.overlap and self.by_sequence and self.communicates):
            return False
        tokens = x.numel() // x.shape[-1] * pieces
        nbytes = tokens * (width or x.shape[-1]) * x.dtype.itemsize
        return overlaps(nbytes, self.ranks, replayed=self.replayed)

    def split(self, x_BTD: Tensor) -> Tensor:
        """Returns the rank's piece of a tensor that every rank has whole."""
        if not self.by_sequence:
            return x_BTD
        self._require_divisible(x_BTD)
        split = _Split.apply if self.communicates else _OwnRows.apply
        return self._piece(split(self._rows(x_BTD), self.group), x_BTD)

    def sum(self, y: Tensor) -> Tensor:
        """Returns the sum over ranks, on every rank. Every rank has the same gradient of the sum, so
        backward passes it on unchanged.
        """
        return _Sum.apply(y, self.group) if self.communicates else y

    def reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks. Autograd follows it only where gradients are enabled."""
        return self.sum(x) if torch.is_grad_enabled() else over_ranks(x, self.active_group)

    def _rows(self, x: Tensor) -> Tensor:
        """Returns a view of x_BTD, or of a piece, in an order in which rank r has the r-th part of dim 0: all
        tokens of the batch, or (positions, batch).
        """
        if x.ndim != 3:
            raise ValueError(
                f"the residual stream is cut along dim 1 of batch, sequence and width, but a layer gets "
                f"an input of shape {tuple(x.shape)}; choose by_sequence=False"
            )
        return x.flatten(0, 1) if self.by_token else x.transpose(0, 1)

    def _gathered(self, rows: Tensor, x_BQD: Tensor) -> Tensor:
        """Undoes `_rows` for all ranks' rows, gathered from pieces like x_BQD."""
        return self._by_batch(rows, x_BQD.shape[0], x_BQD.shape[1] * self.ranks)

    def _piece(self, rows: Tensor, x_BTD: Tensor) -> Tensor:
        """Undoes `_rows` for this rank's rows of a tensor like x_BTD."""
        return self._by_batch(rows, x_BTD.shape[0], x_BTD.shape[1] // self.ranks)

    def _by_batch(self, rows: Tensor, batch: int, length: int) -> Tensor:
        return rows.unflatten(0, (batch, length)) if self.by_token else rows.transpose(0, 1)

    def _require_divisible(self, x_BTD: Tensor) -> None:
        if x_BTD.ndim == 3 and x_BTD.shape[1] % self.ranks:
            raise ValueError(
                f"the sequence has {x_BTD.shape[1]} tokens, which {self.ranks} ranks do not "
                "divide; choose a multiple, or by_sequence=False"
            )


def piece_of(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the rank's rows."""
    length = x.shape[0] // group.size()
    return x.narrow(0, group.rank() * length, length)


# The backward of each function is the forward of another, which makes second derivatives correct. Their
# forward sets ctx itself: setup_context would cost the host 12 us per call.


def _backward(
    function: type[torch.autograd.Function],
    collective: Callable[[Tensor, dist.ProcessGroup], Tensor],
    gradient: Tensor,
    group: dist.ProcessGroup,
) -> tuple[Tensor, None]:
    """Runs the collective on the gradient; as `function`, which autograd follows, if gradients are enabled in
    backward.
    """
    run = function.apply if torch.is_grad_enabled() else collective
    return run(gradient, group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _backward(_ReduceScatter, reduce_scatter, gradient, ctx.group)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(y, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _backward(_Gather, all_gather, gradient, ctx.group)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _copied_piece(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _backward(_Join, all_gather, gradient, ctx.group)


class _Join(torch.autograd.Function):
    """Joins the ranks' rows. Unlike that of _Gather, the gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _backward(_Split, _copied_piece, gradient, ctx.group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(y, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _backward(_SumOfGradients, _unchanged, gradient, ctx.group)


class _SumOfGradients(torch.autograd.Function):
    """Returns its input; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _backward(_Sum, all_reduce, gradient, ctx.group)


class _OwnRows(torch.autograd.Function):
    """Takes the place of _ReduceScatter and _Split without communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _copied_piece(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _repeated(gradient, ctx.group), None


def _repeated(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Takes the place of _Gather without communication: the gradient is the rank's piece."""
    others = x.detach()
    return torch.cat([x if rank == group.rank() else others for rank in range(group.size())])


def _copied_piece(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return piece_of(x, group).clone()


def _unchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x
