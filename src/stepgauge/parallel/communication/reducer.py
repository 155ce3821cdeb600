"""The mean of messages over the ranks of a group."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.communication.collectives import all_reduce_list, all_reduce_of, reduce_to


class GradientReducer:
    """Averages messages over the ranks of a group, in place, without waiting.

    NCCL averages in the collective itself; for other backends a message is divided before it is
    summed, so that 16-bit sums do not overflow. A copy uses the same group; from a file it uses the
    default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        group = group or dist.group.WORLD
        assert group is not None, "torch has raised where there is none"
        self.group = group
        self._is_nccl: dict[str, bool] = {}  # by the device's type

    def __deepcopy__(self, _: Any) -> "GradientReducer":
        return self

    def __reduce__(self) -> Any:
        return GradientReducer, ()

    def is_nccl(self, device: torch.device) -> bool:
        """Whether the group averages itself there, and waiting for it holds up the device alone."""
        if device.type not in self._is_nccl:
            self._is_nccl[device.type] = self.group._get_backend(device).name() == "nccl"
        return self._is_nccl[device.type]

    def launch(self, tensors: Sequence[Tensor]) -> dist.Work:
        """The work of an all-reduce of tensors of one type and device, in one launch, in place."""
        if tensors[0].is_complex():
            tensors = [torch.view_as_real(tensor) for tensor in tensors]
        operation = self.begin_mean(tensors)
        if len(tensors) == 1:
            return all_reduce_of(tensors[0], operation, self.group)
        return all_reduce_list(tensors, operation, self.group)

    def launch_to(self, owner: int, tensor: Tensor) -> dist.Work:
        """The work of a reduction to one rank of the group, in place."""
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        mean = self.begin_mean([tensor])
        return reduce_to(owner, tensor, mean, self.group)

    def launch_any(self, flags: Tensor) -> dist.Work:
        """The work of an all-reduce after which a flag is 1 where it was on any rank."""
        return all_reduce_of(flags, dist.ReduceOp.MAX, self.group)

    def begin_mean(self, tensors: Sequence[Tensor]) -> dist.ReduceOp.RedOpType:
        """The operation that gives the mean of the tensors, which are divided where it is a sum."""
        if self.is_nccl(tensors[0].device):
            return dist.ReduceOp.AVG
        for tensor in tensors:
            tensor.div_(self.ranks)
        return dist.ReduceOp.SUM


def require_dense(gradient: Tensor) -> None:
    """Raises ValueError for a sparse gradient."""
    if gradient.is_sparse:
        shape = tuple(gradient.shape)
        raise ValueError(f"a gradient of shape {shape} is sparse; only dense ones are averaged")
