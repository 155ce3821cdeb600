"""Context parallel: each rank has some tokens of every sequence.

Everything in a network but attention works on each token alone: a module runs on its rank's tokens
as it is, with their positions, and the gradients of its weights are averaged over the group as
those of data parallel are. Attention is that of ring_attention or of head_exchange.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor


@dataclasses.dataclass
class SplitSequences:
    """The ranks of a group, each with its tokens of a sequence.

    communicates  False: each rank computes as much on its own tokens alone, to see what sending
                  costs

    Ranks' means over their tokens are weighed by how many count (CountedMean): targets of -100 lie
    on some ranks more than on others.
    """

    group: dist.ProcessGroup
    communicates: bool = dataclasses.field(default=True, kw_only=True)
    _positions: dict[tuple[int, str], Tensor] = dataclasses.field(
        default_factory=dict, repr=False, kw_only=True
    )

    def __deepcopy__(self, _: Any) -> Self:
        return dataclasses.replace(self)  # a copy talks to the same ranks

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> int:
        return self.group.size()

    def tokens(self, length: int, rank: int) -> Sequence[int]:
        """The positions of a rank's tokens in a sequence of that length."""
        raise NotImplementedError

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """`tokens` of this rank, (length / N,)."""
        key = length, str(device)
        if key not in self._positions:
            with torch.inference_mode(False):  # it is kept, and used in training too
                self._positions[key] = torch.tensor(self.tokens(length, self.rank), device=device)
        return self._positions[key]

    def piece(self, whole: Tensor, dim: int = 1) -> Tensor:
        """The rank's tokens of what has all of them along `dim`."""
        return whole.index_select(dim, self.positions(whole.shape[dim], whole.device))

    def whole(self, piece: Tensor, dim: int = 1) -> Tensor:
        """The inverse of `piece`. All ranks must call it."""
        gathered = [torch.empty_like(piece) for _ in range(self.ranks)]
        dist.all_gather(gathered, piece.contiguous(), group=self.group)
        found = torch.cat(gathered, dim)
        tokens = [self.tokens(found.shape[dim], rank) for rank in range(self.ranks)]
        places = torch.tensor(tokens, device=piece.device).flatten().argsort()
        return found.index_select(dim, places)
