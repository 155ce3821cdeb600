"""Gradients as one tensor that a collective works on in place, and the average of it over ranks."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors as flattened
from torch._utils import _unflatten_dense_tensors

from stepgauge.parallel.collectives import all_reduce_list, all_reduce_of, reduce_scatter_flat
from stepgauge.parallel.widening import widened


def as_one_message(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The gradients of the parameters as one contiguous tensor, of which each `.grad` is a view
    afterwards.

    A gradient that comes alone, and gradients that lie behind each other from an earlier call, are
    taken where they are. Others are packed, which copies them once and frees the originals. A
    missing gradient counts as zero.
    """
    gradients = [_gradient(parameter) for parameter in parameters]
    if _fill_their_storage(gradients):
        if len(gradients) == 1:
            return gradients[0]
        return gradients[0].as_strided((sum(g.numel() for g in gradients),), (1,))
    # torch's own flattening leaves a single tensor where it is.
    flat = flattened(gradients) if len(gradients) > 1 else gradients[0].reshape(-1).clone()
    for parameter, view in zip(parameters, _unflatten_dense_tensors(flat, gradients), strict=True):
        # a view as autograd knows it would hold `flat` as one more user of the storage
        parameter.grad = view.data
    return flat


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(
            parameter, memory_format=torch.contiguous_format
        )
    elif gradient.is_sparse:
        raise ValueError(
            f"a gradient of shape {tuple(parameter.shape)} is sparse; only dense ones are averaged"
        )
    return gradient


def narrow_gradients(
    parameters: Sequence[nn.Parameter], taken: Sequence[Tensor | None], dtype: torch.dtype
) -> list[Tensor]:
    """The parameters' gradients in `dtype`, each contiguous and used by nobody else; without
    `.grad` until `widen`.

    taken  what is there in that type already
    """
    gradients = []
    for parameter, narrow in zip(parameters, taken, strict=True):
        if narrow is None:
            narrow = _gradient(parameter).to(dtype).contiguous()
        elif not _fill_their_storage([narrow]):
            narrow = narrow.clone(memory_format=torch.contiguous_format)
        gradients.append(narrow)
        parameter.grad = None
    return gradients


def widen(message: list[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Gives each parameter its part of the message, packed or one by one, as `.grad` in its own
    type, theirs all.
    """
    dtype = parameters[0].dtype
    if len(message) == 1:
        parts = _unflatten_dense_tensors(widened(message[0].view(-1), dtype), parameters)
    else:  # of a bucket, and so small: a launch for each would take the host longer than the GPU
        parts = [torch.empty_like(part, dtype=dtype) for part in message]
        torch._foreach_copy_(parts, message)
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view(parameter.shape).data  # not a view as autograd knows it


def _fill_their_storage(gradients: Sequence[Tensor]) -> bool:
    """Whether the gradients, in this order, are a whole storage that nothing else uses.

    Autograd may give two parameters gradients that share a storage (of `a.view(-1) + b.view(-1)`,
    say), or read one again after it gave it; averaging one of those in place would change the
    other.
    """
    start = end = gradients[0].data_ptr()
    for gradient in gradients:
        if gradient.data_ptr() != end or not gradient.is_contiguous():
            return False
        end += gradient.nbytes
    storage = gradients[0].untyped_storage()
    # The wrapper object `storage` is one of the users.
    users = torch._C._storage_Use_Count(storage._cdata) - 1
    return (
        storage.data_ptr() == start and storage.nbytes() == end - start and users <= len(gradients)
    )


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


class Averager:
    """Averages messages over the ranks of a group, in place, without waiting.

    NCCL averages in the collective itself; for other backends the message is divided before it is
    summed, so that 16-bit sums do not overflow.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group or dist.distributed_c10d._get_default_group()
        self.ranks = dist.get_world_size(group)
        self._is_nccl: dict[str, bool] = {}  # by the device's type

    def launch(self, message: Tensor, *, owner: int | None = None) -> dist.Work:
        """The work of an all-reduce, or of a reduce to the owner (a rank of the group), in place."""
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

    def launch_list(self, message: Sequence[Tensor]) -> dist.Work:
        """The work of an all-reduce of each tensor, in one launch, in place."""
        if not self._averages(message[0].device):
            for tensor in message:
                tensor.div_(self.ranks)
        return all_reduce_list(message, self._operation(message[0]), self.group)

    def launch_scatter(self, slice_: Tensor, message: Tensor) -> dist.Work:
        """The work of a reduce-scatter into this rank's slice; the message stays as it is."""
        if not self._averages(message.device):
            message = message / self.ranks
        work = reduce_scatter_flat(
            slice_, message, group=self.group, op=self._operation(message), async_op=True
        )
        assert work is not None, "it is asynchronous"
        return work

    def _averages(self, device: torch.device) -> bool:
        if device.type not in self._is_nccl:
            self._is_nccl[device.type] = self.group._get_backend(device).name() == "nccl"
        return self._is_nccl[device.type]

    def _operation(self, message: Tensor) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if self._averages(message.device) else dist.ReduceOp.SUM
