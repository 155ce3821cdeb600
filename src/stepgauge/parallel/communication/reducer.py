"""Computes means over the ranks of a group."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.collectives import (
    launch_all_reduce,
    launch_all_reduce_list,
    launch_reduce,
)


class GradientReducer:
    """Starts collectives that replace tensors by their means over the ranks of a group, in place.

    NCCL computes a mean itself. For other backends the tensors are divided before they are summed, so
    that 16-bit sums do not overflow. A deep copy uses the same group, an unpickled one the default
    group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        group = group or dist.group.WORLD
        assert group is not None, "get_rank raises without a default group"
        self.group = group
        self._is_nccl: dict[str, bool] = {}  # by device type

    def __deepcopy__(self, _: Any) -> "GradientReducer":
        return self

    def __reduce__(self) -> Any:
        return GradientReducer, ()

    def is_nccl(self, device: torch.device) -> bool:
        """Returns True if the group uses NCCL on the device. NCCL computes means, and waiting for its
        works blocks the current stream but not the host.
        """
        if device.type not in self._is_nccl:
            self._is_nccl[device.type] = self.group._get_backend(device).name() == "nccl"
        return self._is_nccl[device.type]

    def launch(self, tensors: Sequence[Tensor]) -> dist.Work:
        """Starts one all-reduce of tensors of one dtype and device, to their means."""
        if tensors[0].is_complex():
            tensors = [torch.view_as_real(tensor) for tensor in tensors]
        operation = self.begin_mean(tensors)
        if len(tensors) == 1:
            return launch_all_reduce(tensors[0], operation, self.group)
        return launch_all_reduce_list(tensors, operation, self.group)

    def launch_to(self, owner: int, tensor: Tensor) -> dist.Work:
        """Starts a reduce of a tensor to its mean at rank `owner` of the group."""
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        operation = self.begin_mean([tensor])
        return launch_reduce(owner, tensor, operation, self.group)

    def launch_any(self, flags: Tensor) -> dist.Work:
        """Starts an all-reduce after which a flag is 1 if it was 1 on any rank."""
        return launch_all_reduce(flags, dist.ReduceOp.MAX, self.group)

    def begin_mean(self, tensors: Sequence[Tensor]) -> dist.ReduceOp.RedOpType:
        """Returns the reduce operation that yields the mean. If it is a sum, divides the tensors by
        the number of ranks first.
        """
        if self.is_nccl(tensors[0].device):
            return dist.ReduceOp.AVG
        for tensor in tensors:
            tensor.div_(self.ranks)
        return dist.ReduceOp.SUM


def require_dense(gradient: Tensor) -> None:
    """Raises ValueError for a sparse gradient."""
    if gradient.is_sparse:
        shape = tuple(gradient.shape)
        raise ValueError(
            f"a gradient of shape {shape} is sparse; only dense gradients can be averaged"
        )
