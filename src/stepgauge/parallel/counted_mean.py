"""Weighs the losses of ranks and micro-batches with unequal numbers of counted targets. A target of
-100, for example, does not count.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Count = Callable[..., float | Tensor]


@dataclasses.dataclass(frozen=True)
class CountedMean:
    """Computes the weights with which the mean losses of parts make the mean over all targets.

    count  called with the targets of a part, returns how many of them its mean loss is over on this
           rank: one number, or one per sequence. With one per sequence the parts of a batch are
           counted in a single call
    group  the ranks whose gradients are averaged; None for one process
    """

    count: Count
    group: dist.ProcessGroup | None = None

    def weights(self, parts: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
        """Returns the weight of each of this rank's parts, given by their targets: the weighted sum of
        the parts' mean losses, averaged over ranks, is the mean over all counted targets. NaN if
        nothing counts on any rank, as that mean is. All ranks of the group must call it.
        """
        counts = [torch.as_tensor(self.count(*targets)).sum() for targets in parts]
        return self._weights(torch.stack(counts), device)

    def weights_of_equal(
        self, targets: Sequence[Tensor], parts: int, device: torch.device
    ) -> Tensor:
        """Returns the `weights` of a batch that is split into `parts` parts of equally many rows."""
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
    """Returns loss * weight. A loss over no targets is NaN; with a weight of 0 it counts as 0. If
    nothing counts on any rank, the weight is NaN: the result is NaN and its gradient zero.
    """
    return torch.where(weight > 0, loss * gradient_of(weight), (weight * 0).to(loss.dtype))


def gradient_of(weight: Tensor) -> Tensor:
    """Returns the gradient of the weighted loss with respect to the loss. It is 0 for a weight of NaN,
    because a loss would pass NaN on to the weights of the network.
    """
    return weight.nan_to_num()
