"""Collectives around the residual stream of a tensor parallel network, as autograd and
torch.compile see them.

Legend: B batch, T sequence, D model width, N ranks, Q = T/N.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stepgauge.parallel.tensor_parallel.overlapped import gathered_product, scattered_product
from stepgauge.spec.plan.tensor import overlaps

# The operators behind torch.distributed._functional_collectives: the compiler keeps them in its
# graph, where collectives that write into their argument break it.
_ops = torch.ops._c10d_functional


@dataclasses.dataclass(eq=False)
class ResidualStream:
    """What ranks exchange where a module begins or ends to be cut.

    by_sequence   each rank has a piece x_BQD of the stream, rather than all of x_BTD
    overlap       collectives that are large enough run beside the product next to them: a stream in
                  pieces, of a group that `exchange.register` knows
    communicates  False leaves the collectives out, to time the rest; results are then of the right
                  shape and wrong
    """

    group: dist.ProcessGroup
    by_sequence: bool = True
    overlap: bool = False
    communicates: bool = True

    def __deepcopy__(self, _: Any) -> "ResidualStream":
        return dataclasses.replace(self)  # a copy talks to the same ranks

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def enter(self, x: Tensor) -> Tensor:
        """x_BTD, of which each rank goes on to compute a part: gathered, if it is in pieces.
        Backward sums what the ranks say about it.
        """
        if self.by_sequence:
            _require_sequence(x)
        if not self.communicates:
            return x.repeat(1, self.ranks, 1) if self.by_sequence else x
        return (_Gather if self.by_sequence else _SumOfGradients).apply(x, self.group)

    def leave(self, y_BTD: Tensor) -> Tensor:
        """The sum over ranks, of which each takes its piece if the stream is in pieces."""
        if not self.by_sequence:
            return self.sum(y_BTD)
        self._check(y_BTD)
        if not self.communicates:
            return piece_of(y_BTD, self.group)
        return _ReduceScatter.apply(y_BTD, self.group)

    def entering(self, x: Tensor, weight_FD: Tensor, bias: Tensor | None = None) -> Tensor:
        """The linear layer of what `enter` gives: some of its features on each rank."""
        if not self._overlaps(x, self.ranks):
            return F.linear(self.enter(x), weight_FD, bias)
        y_BTF = gathered_product(x, weight_FD.to(x.dtype), self.group)
        return y_BTF if bias is None else y_BTF + bias.to(x.dtype)

    def leaving(self, x_BTF: Tensor, weight_DF: Tensor) -> Tensor:
        """What `leave` gives of a linear layer that has some of its inputs on each rank."""
        if not self._overlaps(x_BTF, 1, width=weight_DF.shape[0]):
            return self.leave(F.linear(x_BTF, weight_DF))
        self._check(x_BTF)
        return scattered_product(x_BTF, weight_DF.to(x_BTF.dtype), self.group)

    def _overlaps(self, x: Tensor, pieces: int, width: int = 0) -> bool:
        if not (self.overlap and self.by_sequence and self.communicates):
            return False
        nbytes = x.shape[0] * x.shape[1] * pieces * (width or x.shape[2]) * x.dtype.itemsize
        return overlaps(nbytes, self.ranks)

    def split(self, x_BTD: Tensor) -> Tensor:
        """The rank's piece of what every rank has whole."""
        if not self.by_sequence:
            return x_BTD
        self._check(x_BTD)
        if not self.communicates:
            return piece_of(x_BTD, self.group)
        return _Split.apply(x_BTD, self.group)

    def sum(self, y: Tensor) -> Tensor:
        """The sum over ranks, on each. The gradient is the same on each, and goes on as it is."""
        return _Sum.apply(y, self.group) if self.communicates else y

    def reduced(self, x: Tensor, operation: str = "sum") -> Tensor:
        """The sum (or what `operation` says) over ranks. Autograd follows a sum alone."""
        if operation == "sum" and torch.is_grad_enabled():
            return self.sum(x)
        return over_ranks(x, self.heard, operation)

    @property
    def heard(self) -> dist.ProcessGroup | None:
        """The group, or None where nothing is communicated."""
        return self.group if self.communicates else None

    def _check(self, x_BTD: Tensor) -> None:
        _require_sequence(x_BTD)
        if x_BTD.shape[1] % self.ranks:
            raise ValueError(
                f"the sequence has {x_BTD.shape[1]} tokens, which {self.ranks} ranks do not "
                "divide; choose a multiple, or by_sequence=False"
            )


def _require_sequence(x: Tensor) -> None:
    if x.ndim != 3:
        raise ValueError(
            f"the residual stream is cut along dim 1 of batch, sequence and width, and a layer is "
            f"given {tuple(x.shape)}; choose by_sequence=False"
        )


def all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """The sum (or what `operation` says) over ranks, as a new tensor."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, group.group_name))


def over_ranks(x: Tensor, group: dist.ProcessGroup | None, operation: str = "sum") -> Tensor:
    """`all_reduce`, or x as it is without a group."""
    return x if group is None else all_reduce(x, group, operation)


def all_gather(x_BQD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x_BTD of all ranks' pieces."""
    pieces_QBD = x_BQD.transpose(0, 1).contiguous()
    gathered = _ops.all_gather_into_tensor(pieces_QBD, group.size(), group.group_name)
    return _ops.wait_tensor(gathered).transpose(0, 1)


def reduce_scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rank's piece x_BQD of the sum over ranks."""
    whole_TBD = x_BTD.transpose(0, 1).contiguous()
    piece = _ops.reduce_scatter_tensor(whole_TBD, "sum", group.size(), group.group_name)
    return _ops.wait_tensor(piece).transpose(0, 1)


def begin_all_to_all(x_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """y_N with x[n] of this rank as y[rank] of rank n, to be read after `arrived`."""
    rows = [1] * group.size()
    sent: Tensor = _ops.all_to_all_single(x_N, rows, rows, group.group_name)
    return sent


def arrived(y: Tensor) -> Tensor:
    """y, once the current stream has waited for the collective that gives it."""
    found: Tensor = _ops.wait_tensor(y)
    return found


def piece_of(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    length = x_BTD.shape[1] // group.size()
    return x_BTD.narrow(1, group.rank() * length, length)


class _Function(torch.autograd.Function):
    """Its backward is another one's forward, so that a backward is differentiated again rightly."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]


def _mirrored(
    function: type[_Function], gradient: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, None]:
    """What `function` gives of the gradient, which autograd follows where it is asked to."""
    if torch.is_grad_enabled():
        return function.apply(gradient, group), None
    return function.forward(gradient, group), None


class _Gather(_Function):
    @staticmethod
    def forward(x_BQD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_gather(x_BQD, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _mirrored(_ReduceScatter, gradient, ctx.group)


class _ReduceScatter(_Function):
    @staticmethod
    def forward(y_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return reduce_scatter(y_BTD, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _mirrored(_Gather, gradient, ctx.group)


class _Split(_Function):
    @staticmethod
    def forward(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return piece_of(x_BTD, group).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _mirrored(_Join, gradient, ctx.group)


class _Join(_Function):
    """All ranks' pieces, of which every rank has the whole gradient."""

    @staticmethod
    def forward(x_BQD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_gather(x_BQD, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _mirrored(_Split, gradient, ctx.group)


class _Sum(_Function):
    @staticmethod
    def forward(y: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(y, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if not torch.is_grad_enabled():
            return gradient, None
        return _mirrored(_SumOfGradients, gradient, ctx.group)


class _SumOfGradients(_Function):
    @staticmethod
    def forward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _mirrored(_Sum, gradient, ctx.group)
