"""Context parallel by heads (DeepSpeed Ulysses, Jacobs et al. 2023): for attention, the ranks of a
sequence exchange tokens of some heads for heads of some tokens.

    context = HeadExchange(group)
    o_BHQW = context.attend(attention, q_BHQW, k_BKQW, v_BKQW)

Each rank has a run of the tokens. It sends each other rank some heads of them, attends with all
tokens of its own heads by any function, and sends the outputs back. The heads go in groups: those of
the second group travel while the first attends. A collective is launched by one function of autograd
and awaited by another, so that backward, which runs them in reverse, hides as much.

Legend: B batch, H query heads, K key heads, T tokens, Q = T/N tokens of a rank, W head width, N
ranks, G groups, h heads of a rank and group.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.context_parallel.split_sequences import SplitSequences
from stepgauge.parallel.tensor_parallel.residual_stream import launch_all_to_all, wait_for
from stepgauge.spec.plan.context import contiguous_positions, num_head_groups


@dataclasses.dataclass
class HeadExchange(SplitSequences):
    """The ranks of a group, each with a run of the tokens of a sequence."""

    def tokens(self, length: int, rank: int) -> Sequence[int]:
        """Raises ValueError for a length that N does not divide."""
        return contiguous_positions(length, rank, self.ranks)

    @torch.compiler.disable
    def attend(
        self,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        q_BHQW: Tensor,
        k_BKQW: Tensor,
        v_BKQW: Tensor,
    ) -> Tensor:
        """o_BHQW of the rank's tokens over those of all ranks. Every rank must call it. Raises
        ValueError where N does not divide the heads of k.

        Sends (N-1)/N of q, k, v and o in forward, and as much in backward.
        """
        if k_BKQW.shape[1] % self.ranks:
            raise ValueError(
                f"there are {k_BKQW.shape[1]} heads of keys, which {self.ranks} ranks do not divide; "
                f"exchange keys around a ring instead"
            )
        ranks, group = self.ranks, self.group if self.communicates else None
        groups = num_head_groups(k_BKQW.shape[1], ranks)

        def by_group(x_BHQW: Tensor) -> Iterable[Tensor]:
            return x_BHQW.transpose(1, 2).unflatten(2, (groups, ranks, -1)).unbind(2)

        def sent(x_BQNhW: Tensor) -> Tensor:
            x_NBQhW: Tensor = _Send.apply(x_BQNhW.permute(2, 0, 1, 3, 4), group)
            return x_NBQhW

        # All of one group before the next, which its attention does not wait for.
        qkv_BQNhW = zip(*map(by_group, (q_BHQW, k_BKQW, v_BKQW)), strict=True)
        sent_NBQhW = [[sent(x) for x in each] for each in qkv_BQNhW]
        outputs_NBQhW = []
        for each in sent_NBQhW:
            qkv_BhTW = [_Arrive.apply(x, group).permute(1, 3, 0, 2, 4).flatten(2, 3) for x in each]
            o_BhNQW = attention(*qkv_BhTW).unflatten(2, (ranks, -1))
            outputs_NBQhW.append(_Send.apply(o_BhNQW.permute(2, 0, 3, 1, 4), group))
        parts_BQNhW = [_Arrive.apply(x, group).permute(1, 2, 0, 3, 4) for x in outputs_NBQhW]
        return torch.stack(parts_BQNhW, 2).flatten(2, 4).transpose(1, 2)


class _Send(torch.autograd.Function):
    """To rank n, x[n]. What is given is still on its way, until `_Arrive`."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _launch(x_N, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # it is differentiated again
            return _Arrive.apply(gradient, ctx.group), None
        return _await(gradient, ctx.group), None


class _Arrive(torch.autograd.Function):
    """Of rank n, y[n]."""

    @staticmethod
    def forward(ctx: Any, y_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _await(y_N, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            return _Send.apply(gradient, ctx.group), None
        return _launch(gradient, ctx.group), None


def _launch(x_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    x_N = x_N.contiguous()
    return x_N if group is None else launch_all_to_all(x_N, group)


def _await(y_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return y_N if group is None else wait_for(y_N)
