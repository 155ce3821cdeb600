"""Context parallel by heads (DeepSpeed Ulysses, Jacobs et al. 2023).

    context = HeadExchange(group)
    o_BHQW = context.attend(attention, q_BHQW, k_BKQW, v_BKQW)

Each rank has a contiguous part of the tokens. For attention it sends some heads of its tokens to each
other rank, and receives all tokens of its own heads. It runs any attention function on them and sends
the outputs back. The heads are divided into groups if possible: the next group travels while attention
runs on one. One autograd function launches an all-to-all and another waits for it, so backward, which
runs them in reverse, overlaps just as much.

Legend: B batch, H query heads, K key heads, T tokens, Q = T/N tokens of a rank, W head width, N
ranks, G groups, h heads of a rank and group, L values of a token and group.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.copied_all_to_all import copied_all_to_all
from stepgauge.parallel.communication.groups_by_name import register
from stepgauge.parallel.context_parallel.split_sequences import SplitSequences
from stepgauge.parallel.tensor_parallel.residual_stream import launch_all_to_all, wait_for
from stepgauge.spec.plan.context import contiguous_positions, num_head_groups


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
        num_groups = num_head_groups(k_BKQW.shape[1], self.ranks)
        qkv_GNBQhW = list(
            zip(
                *(_by_group(x, num_groups, self.ranks) for x in (q_BHQW, k_BKQW, v_BKQW)),
                strict=True,
            )
        )
        shapes_hW = [x_NBQhW.shape[3:] for x_NBQhW in qkv_GNBQhW[0]]

        def attend_all_tokens(x_NBQL: Tensor) -> Tensor:
            o_BhTW = attention(*map(_all_tokens, _parted(x_NBQL, shapes_hW)))
            return o_BhTW.unflatten(2, (self.ranks, -1)).permute(2, 0, 3, 1, 4)

        parts_NBQhW = self._exchange(map(_joined, qkv_GNBQhW), attend_all_tokens)
        parts_BQNhW = [part.permute(1, 2, 0, 3, 4) for part in parts_NBQhW]
        return torch.stack(parts_BQNhW, 2).flatten(2, 4).transpose(1, 2)

    def _exchange(
        self, messages: Iterator[Tensor], compute: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Sends each message, computes a result from what has arrived, and sends it back. Returns what
        comes back. While one result is computed, the next message and the last result travel.

        The next message starts before the computation: next to attention, NCCL's kernel waits for
        multiprocessors unless it came first.
        """
        transport = self.group if self.communicates else None, self.by_copies
        following: Tensor | None = _Launch.apply(next(messages), *transport)
        results, returned = [], []
        while following is not None:
            message, following = following, next(messages, None)
            if following is not None:
                following = _Launch.apply(following, *transport)
            result = compute(_Wait.apply(message, *transport))
            results.append(_Launch.apply(result, *transport))
            returned += [_Wait.apply(each, *transport) for each in results[-2:-1]]
        return [*returned, _Wait.apply(results[-1], *transport)]


class _Launch(torch.autograd.Function):
    """Starts to send x[n] to rank n. The result must not be read before `_Wait`."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, group: dist.ProcessGroup | None, by_copies: bool) -> Tensor:
        ctx.transport = group, by_copies
        return _launch_all_to_all(x_N, group, by_copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # for second derivatives
            return _Wait.apply(gradient, *ctx.transport), None, None
        return _wait_for(gradient, ctx.transport[0]), None, None


class _Wait(torch.autograd.Function):
    """Waits for y, where y[n] comes from rank n."""

    @staticmethod
    def forward(ctx: Any, y_N: Tensor, group: dist.ProcessGroup | None, by_copies: bool) -> Tensor:
        ctx.transport = group, by_copies
        return _wait_for(y_N, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            return _Launch.apply(gradient, *ctx.transport), None, None
        return _launch_all_to_all(gradient, *ctx.transport), None, None


def _by_group(x_BHQW: Tensor, num_groups: int, ranks: int) -> Sequence[Tensor]:
    """Returns x_NBQhW of each group, as views."""
    x_BQGNhW = x_BHQW.transpose(1, 2).unflatten(2, (num_groups, ranks, -1))
    return x_BQGNhW.permute(2, 3, 0, 1, 4, 5).unbind()


def _joined(parts_NBQhW: Sequence[Tensor]) -> Tensor:
    """Returns all heads of a token next to each other. They may have different widths."""
    return torch.cat([part_NBQhW.flatten(3) for part_NBQhW in parts_NBQhW], 3)


def _parted(x_NBQL: Tensor, shapes_hW: Sequence[torch.Size]) -> list[Tensor]:
    """Returns what `_joined` was given, as views."""
    parts_NBQL = x_NBQL.split([math.prod(hW) for hW in shapes_hW], 3)
    return [part.unflatten(3, hW) for part, hW in zip(parts_NBQL, shapes_hW, strict=True)]


def _all_tokens(x_NBQhW: Tensor) -> Tensor:
    """Returns x_BhTW, the tokens of all ranks in order."""
    return x_NBQhW.permute(1, 3, 0, 2, 4).flatten(2, 3)


def _launch_all_to_all(x_N: Tensor, group: dist.ProcessGroup | None, by_copies: bool) -> Tensor:
    x_N = x_N.contiguous()
    if group is None:
        return x_N
    if by_copies:
        return copied_all_to_all(x_N, group.group_name)
    return launch_all_to_all(x_N, group)


def _wait_for(y_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return y_N if group is None else wait_for(y_N)
