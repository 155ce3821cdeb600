"""A mean over all that counts, of ranks and micro-batches that have unequal parts of it: targets of
-100 count on none.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Count = Callable[..., float | Tensor]


@dataclasses.dataclass(frozen=True)
class CountedMean:
    """What means of parts weigh in the mean over ranks.

    count  of a part's targets, how many are in its mean on this rank: in all, or of each sequence,
           which counts the parts of a batch in one call
    group  the ranks whose gradients are averaged; None: this process alone
    """

    count: Count
    group: dist.ProcessGroup | None = None

    def weights(self, parts: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
        """Of this rank's parts, by the targets of each: the weighted sum of their means, averaged
        over ranks, is the mean over all. NaN where nothing counts at all, as that mean is. Every
        rank of the group must call it.
        """
        counts = [torch.as_tensor(self.count(*targets)).sum() for targets in parts]
        return self._weights(torch.stack(counts), device)

    def weights_of_equal(
        self, targets: Sequence[Tensor], parts: int, device: torch.device
    ) -> Tensor:
        """`weights` of a batch in so many equal parts."""
        counts = torch.as_tensor(self.count(*targets))
        if counts.ndim:
            return self._weights(counts.unflatten(0, (parts, -1)).sum(1), device)
        return self.weights([*zip(*(t.chunk(parts) for t in targets), strict=True)], device)

    def _weights(self, counts: Tensor, device: torch.device) -> Tensor:
        counts = counts.to(device, torch.float32)
        ranks, total = 1, counts.sum()
        if self.group is not None:
            ranks = self.group.size()
            dist.all_reduce(total, group=self.group)
        return counts * (ranks / total)


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """The mean over no tokens is NaN, and counts as nothing beside others. Where nothing counts at
    all it stays NaN, and its gradient is zero.
    """
    return torch.where(weight > 0, loss * gradient_of(weight), (weight * 0).to(loss.dtype))


def gradient_of(weight: Tensor) -> Tensor:
    """Of the weighted loss: not NaN where the weight is, since a loss hands it on to weights."""
    return weight.nan_to_num()
