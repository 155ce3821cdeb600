"""Context parallel: each rank has some tokens of every sequence.

Everything in a network except attention works on each token separately. So modules run unchanged on
their rank's tokens and the tokens' positions, and weight gradients are averaged over the group as in
data parallel. For attention see ring_attention and head_exchange.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor


@dataclasses.dataclass
class SplitSequences:
    """A group of ranks that share sequences.

    communicates  False: each rank computes the same amount on its own tokens only, to time everything
                  except communication

    The mean losses of the ranks must be weighted by the number of tokens that count (CountedMean),
    because targets of -100 are not spread evenly.
    """

    group: dist.ProcessGroup
    communicates: bool = dataclasses.field(default=True, kw_only=True)
    _positions: dict[tuple[int, str], Tensor] = dataclasses.field(
        default_factory=dict, repr=False, kw_only=True
    )

    def __deepcopy__(self, _: Any) -> Self:
        return dataclasses.replace(self)  # the copy keeps the process group

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> int:
        return self.group.size()

    def tokens(self, length: int, rank: int) -> Sequence[int]:
        """Returns the positions of a rank's tokens in a sequence of that length."""
        raise NotImplementedError

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Returns the positions of this rank's tokens, (length / N,)."""
        key = length, str(device)
        if key not in self._positions:
            with torch.inference_mode(False):  # it is cached and also used in training
                self._positions[key] = torch.tensor(self.tokens(length, self.rank), device=device)
        return self._positions[key]

    def piece(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Returns the rank's tokens of a tensor that has all tokens along `dim`."""
        return whole.index_select(dim, self.positions(whole.shape[dim], whole.device))

    def whole(self, piece: Tensor, dim: int = 1) -> Tensor:
        """Returns all tokens from the ranks' pieces. All ranks must call it."""
        pieces = [torch.empty_like(piece) for _ in range(self.ranks)]
        dist.all_gather(pieces, piece.contiguous(), group=self.group)
        by_rank = torch.cat(pieces, dim)
        positions = [self.tokens(by_rank.shape[dim], rank) for rank in range(self.ranks)]
        order = torch.tensor(positions, device=piece.device).flatten().argsort()
        return by_rank.index_select(dim, order)
