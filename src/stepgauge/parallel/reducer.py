"""The mean of messages over the ranks of a group."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.parallel.collectives import all_reduce_list, all_reduce_of, reduce_scatter_flat


class Launched(Protocol):
    """A message on its way. After `wait` what is computed next sees its result; on a GPU the host
    goes on.
    """

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class Done:
    """What was done at once, or not at all."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


class GradientReducer:
    """Averages messages over the ranks of a group, in place, without waiting.

    NCCL averages in the collective itself; for other backends the message is divided before it is
    summed, so that 16-bit sums do not overflow. A copy uses the same group; from a file it uses the
    default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._is_nccl: dict[str, bool] = {}  # by the device's type

    def __deepcopy__(self, _: Any) -> "GradientReducer":
        return self

    def __reduce__(self) -> Any:
        return GradientReducer, ()

    def launch(self, message: Tensor, *, owner: int | None = None) -> dist.Work:
        """The work of an all-reduce, or of a reduce to the owner (a rank of the group), in place."""
        message = torch.view_as_real(message) if message.is_complex() else message
        if not self._averages(message.device):
            message.div_(self.ranks)
        operation = self._operation(message)
        if owner is None:
            return all_reduce_of(message, operation, self.group)
        return dist.reduce(message, group_dst=owner, op=operation, group=self.group, async_op=True)

    def takes_lists(self, device: torch.device) -> bool:
        """Whether `launch_list` sends tensors of that device where they lie: packing them first
        gains nothing.
        """
        return self._averages(device)

    def waits_on_device(self, device: torch.device) -> bool:
        """Whether waiting for a work holds the device up and not the host."""
        return self._averages(device)

    def _averages(self, device: torch.device) -> bool:
        if device.type not in self._is_nccl:
            self._is_nccl[device.type] = self.group._get_backend(device).name() == "nccl"
        return self._is_nccl[device.type]

    def launch_list(self, message: Sequence[Tensor]) -> dist.Work:
        """The work of an all-reduce of each tensor, in one launch, in place."""
        if not self._averages(message[0].device):
            for tensor in message:
                tensor.div_(self.ranks)
        return all_reduce_list(message, self._operation(message[0]), self.group)

    def launch_scatter(self, slice_: Tensor, message: Tensor) -> dist.Work | None:
        """The work of a reduce-scatter into this rank's slice, which uses the message up."""
        if not self._averages(message.device):
            message.div_(self.ranks)
        return reduce_scatter_flat(
            slice_, message, group=self.group, op=self._operation(message), async_op=True
        )

    def launch_any(self, flags: Tensor) -> dist.Work:
        """The work of an all-reduce after which a flag is 1 where it was on any rank."""
        return all_reduce_of(flags, dist.ReduceOp.MAX, self.group)

    def _operation(self, message: Tensor) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if self._averages(message.device) else dist.ReduceOp.SUM
