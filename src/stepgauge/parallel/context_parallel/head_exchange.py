"""Context parallel by heads (DeepSpeed Ulysses, Jacobs et al. 2023).

    context = HeadExchange(group)
    o_BHQW = context.attend(attention, q_BHQW, k_BKQW, v_BKQW)

Each rank has a contiguous part of the tokens. For attention it sends some heads of its tokens to each
other rank, and receives all tokens of its own heads. It runs any attention function on them and sends
the outputs back. The heads are divided into two groups if possible: the second group travels while
attention runs on the first. One autograd function launches a collective and another waits for it, so
backward, which runs them in reverse, overlaps just as much.

Legend: B batch, H query heads, K key heads, T tokens, Q = T/N tokens of a rank, W head width, N
ranks, G groups, h heads of a rank and group, L values of a token and group.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.context_parallel.split_sequences import SplitSequences
from stepgauge.parallel.tensor_parallel.residual_stream import launch_all_to_all, wait_for
from stepgauge.spec.plan.context import contiguous_positions, num_head_groups


@dataclasses.dataclass
class HeadExchange(SplitSequences):
    """A group of ranks, each with a contiguous part of every sequence."""

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
        ranks, group = self.ranks, self.group if self.communicates else None
        num_groups = num_head_groups(k_BKQW.shape[1], ranks)

        def by_group(x_BHQW: Tensor) -> Sequence[Tensor]:
            x_BQGNhW = x_BHQW.transpose(1, 2).unflatten(2, (num_groups, ranks, -1))
            return x_BQGNhW.permute(2, 3, 0, 1, 4, 5).unbind()

        # Queries, keys and values of a group are one message. NCCL's kernel for the second group then
        # starts before attention on the first group; a kernel that comes later waits for
        # multiprocessors until that attention has ended.
        qkv_GNBQhW = list(zip(*map(by_group, (q_BHQW, k_BKQW, v_BKQW)), strict=True))
        shapes_hW = [x_NBQhW.shape[3:] for x_NBQhW in qkv_GNBQhW[0]]
        in_flight_NBQL = [_Launch.apply(_joined(qkv_NBQhW), group) for qkv_NBQhW in qkv_GNBQhW]
        outputs_NBQhW = []
        for x_NBQL in in_flight_NBQL:
            qkv_BhTW = map(_all_tokens, _parted(_Wait.apply(x_NBQL, group), shapes_hW))
            o_BhNQW = attention(*qkv_BhTW).unflatten(2, (ranks, -1))
            outputs_NBQhW.append(_Launch.apply(o_BhNQW.permute(2, 0, 3, 1, 4), group))
        parts_BQNhW = [_Wait.apply(x, group).permute(1, 2, 0, 3, 4) for x in outputs_NBQhW]
        return torch.stack(parts_BQNhW, 2).flatten(2, 4).transpose(1, 2)


class _Launch(torch.autograd.Function):
    """Starts to send x[n] to rank n. The result must not be read before `_Wait`."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _launch_all_to_all(x_N, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # for second derivatives
            return _Wait.apply(gradient, ctx.group), None
        return _wait_for(gradient, ctx.group), None


class _Wait(torch.autograd.Function):
    """Waits for y, where y[n] comes from rank n."""

    @staticmethod
    def forward(ctx: Any, y_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _wait_for(y_N, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            return _Launch.apply(gradient, ctx.group), None
        return _launch_all_to_all(gradient, ctx.group), None


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


def _launch_all_to_all(x_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    x_N = x_N.contiguous()
    return x_N if group is None else launch_all_to_all(x_N, group)


def _wait_for(y_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return y_N if group is None else wait_for(y_N)
