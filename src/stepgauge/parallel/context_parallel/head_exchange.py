"""Context parallel by heads (DeepSpeed Ulysses, Jacobs et al. 2023).

    context = HeadExchange(group)
    o_BHQW = context.attend(attention, q_BHQW, k_BKQW, v_BKQW)

Each rank has a contiguous part of the tokens. For attention it sends some heads of its tokens to each
other rank, and receives all tokens of its own heads. It runs any attention function on them and sends
the outputs back. The heads are divided into groups if possible: the next group travels while attention
runs on one. One autograd function launches an exchange and another waits for it, so backward, which
runs them in reverse, overlaps just as much. A rank's own part stays where it is.

Legend: B batch, H query heads, K key heads, T tokens, Q = T/N tokens of a rank, W head width, N
ranks, M = N - 1 other ranks, G groups, h heads of a rank and group, L values of a token and message.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.copied_all_to_all import copied_all_to_all
from stepgauge.parallel.communication.graph_collectives import exchange_with_others, wait_for
from stepgauge.parallel.communication.groups_by_name import register
from stepgauge.parallel.context_parallel.split_sequences import SplitSequences
from stepgauge.spec.plan.context import contiguous_positions, num_head_groups

Tensors = Sequence[Tensor]  # x_BQhW, those of a rank and group


class InFlight(NamedTuple):
    """An exchange that has started.

    own     this rank's tensors for itself, which are not sent
    others  what the other ranks send, not to be read before `_Wait`
    shapes  (h, W) of the tensors in a message
    """

    own: Tensors
    others: Tensor
    shapes: list[torch.Size]


@dataclasses.dataclass
class HeadExchange(SplitSequences):
    """A group of ranks, each with a contiguous part of every sequence.

    by_copies  the copy engines of GPUs on one machine move the heads, also while attention runs;
               otherwise the collectives of the group do
    """

    by_copies: bool = False

    def __post_init__(self) -> None:
        if self.by_copies:
            register(self.group)

    def tokens(self, length: int, rank: int) -> Sequence[int]:
        """Raises ValueError if the length is not a multiple of N."""
        return contiguous_positions(length, rank, self.ranks)

    def attend(
        self,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        q_BHQW: Tensor,
        k_BKQW: Tensor,
        v_BKQW: Tensor,
    ) -> Tensor:
        """Returns o_BHQW, the attention of this rank's tokens to those of all ranks. Every rank must
        call it. Sends (N-1)/N of q, k, v and o in forward, and as much in backward.

        Raises ValueError if the number of key heads is not a multiple of N.
        """
        if k_BKQW.shape[1] % self.ranks:
            raise ValueError(
                f"there are {k_BKQW.shape[1]} key heads, which {self.ranks} ranks do not divide; use "
                f"ring attention instead"
            )
        if self.ranks == 1:
            return attention(q_BHQW, k_BKQW, v_BKQW)
        num_groups = num_head_groups(k_BKQW.shape[1], self.ranks)
        qkv = [_pieces(x, num_groups * self.ranks) for x in (q_BHQW, k_BKQW, v_BKQW)]
        qkv_BQhW = list(zip(*qkv, strict=True))  # by group and rank
        following = self._send(qkv_BQhW[: self.ranks])
        results, outputs = [], []
        for number in range(1, num_groups + 1):
            # The next group starts before attention: an NCCL kernel that comes later waits for
            # multiprocessors until attention has ended.
            current = following
            if number < num_groups:
                following = self._send(qkv_BQhW[number * self.ranks :][: self.ranks])
            results.append(self._send(_attend_all(attention, self._receive(current))))
            if number > 1:
                outputs += self._receive(results[-2])
        outputs += self._receive(results[-1])
        return torch.cat([o_BQhW for (o_BQhW,) in outputs], 2).transpose(1, 2)

    def _send(self, by_rank: Sequence[Tensors]) -> InFlight:
        """Starts to send its tensors to each other rank."""
        own, shapes_hW = by_rank[self.rank], [x_BQhW.shape[2:] for x_BQhW in by_rank[0]]
        others = [tensors for rank, tensors in enumerate(by_rank) if rank != self.rank]
        message_MBQL = torch.stack(
            [torch.cat([x_BQhW.flatten(2) for x_BQhW in tensors], 2) for tensors in others]
        )
        return InFlight(own, _Launch.apply(message_MBQL, *self._transport), shapes_hW)

    def _receive(self, tensors: InFlight) -> list[Tensors]:
        """Waits for the tensors of all ranks, and returns them by rank."""
        sizes = [math.prod(shape) for shape in tensors.shapes]
        by_rank: list[Tensors] = []
        for x_BQL in _Wait.apply(tensors.others, *self._transport).unbind():
            parts = zip(x_BQL.split(sizes, 2), tensors.shapes, strict=True)
            by_rank.append([part_BQl.unflatten(2, shape) for part_BQl, shape in parts])
        return [*by_rank[: self.rank], tensors.own, *by_rank[self.rank :]]

    @property
    def _transport(self) -> tuple[dist.ProcessGroup | None, bool]:
        return self.group if self.communicates else None, self.by_copies


def _attend_all(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], by_rank: Sequence[Tensors]
) -> list[Tensors]:
    """Returns o_BQhW for each rank. The queries, keys and values of all ranks' tokens attend."""
    qkv_BhTW = [
        torch.cat([x_BQhW.transpose(1, 2) for x_BQhW in parts], 2)
        for parts in zip(*by_rank, strict=True)
    ]
    o_BhTW = attention(*qkv_BhTW)
    return [[o_BhQW.transpose(1, 2)] for o_BhQW in o_BhTW.chunk(len(by_rank), 2)]


class _Launch(torch.autograd.Function):
    """Starts to send x[m] to the m-th other rank. The result must not be read before `_Wait`."""

    @staticmethod
    def forward(ctx: Any, x_M: Tensor, group: dist.ProcessGroup | None, by_copies: bool) -> Tensor:
        ctx.transport = group, by_copies
        return _launch(x_M, group, by_copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # for second derivatives
            return _Wait.apply(gradient, *ctx.transport), None, None
        group, _ = ctx.transport
        return _wait(gradient, group), None, None


class _Wait(torch.autograd.Function):
    """Waits for y, where y[m] comes from the m-th other rank."""

    @staticmethod
    def forward(ctx: Any, y_M: Tensor, group: dist.ProcessGroup | None, by_copies: bool) -> Tensor:
        ctx.transport = group, by_copies
        return _wait(y_M, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            return _Launch.apply(gradient, *ctx.transport), None, None
        return _launch(gradient, *ctx.transport), None, None


def _launch(x_M: Tensor, group: dist.ProcessGroup | None, by_copies: bool) -> Tensor:
    x_M = x_M.contiguous()
    if group is None:
        return x_M
    if by_copies:
        return copied_all_to_all(x_M, group.group_name)
    return exchange_with_others(x_M, group)


def _wait(y_M: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return y_M if group is None else wait_for(y_M)


def _pieces(x_BHQW: Tensor, count: int) -> Tensors:
    """Returns x_BQhW for each group and rank, as views."""
    return x_BHQW.transpose(1, 2).unflatten(2, (count, -1)).unbind(2)
