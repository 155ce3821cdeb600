"""Tensors sharded along their first dimension, as DTensors, and how shards are sent."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stepgauge.parallel.communication.collectives import reduce_scatter_flat
from stepgauge.parallel.communication.reducer import GradientReducer
from stepgauge.spec.units import ceil_div


class Sharding(GradientReducer):
    """The ranks that tensors are sharded over."""

    def __init__(self, group: Any = None, device_type: str = "cpu"):
        super().__init__(group)
        # DTensor's caches take meshes of the same ranks and names to be equal, and would compute over
        # the first group of these ranks.
        names = None if self.group is dist.group.WORLD else (self.group.group_name,)
        self.mesh = DeviceMesh.from_group(self.group, device_type, mesh_dim_names=names)

    def __reduce__(self) -> Any:
        return Sharding, (None, self.mesh.device_type)

    def launch_scatter(self, slice_: Tensor, message: Tensor) -> Any:
        """Starts a reduce-scatter of the message, whose values it overwrites: this rank's slice gets
        the mean.
        """
        operation = self.begin_mean([message])
        return reduce_scatter_flat(slice_, message, group=self.group, op=operation, async_op=True)

    def shard(self, whole: Tensor) -> DTensor:
        """Returns this rank's shard of a tensor that all ranks have whole."""
        rows = self.rows_per_rank(whole.shape[0])
        first = min(self.rank * rows, whole.shape[0])
        shard = whole[first : first + rows].contiguous().clone()
        stride = torch.empty(whole.shape, device="meta").stride()
        return DTensor.from_local(
            shard, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=stride
        )

    def rows_per_rank(self, rows: int) -> int:
        """Returns the rows of each rank's shard, with the padding of the last ranks."""
        return ceil_div(rows, self.ranks)


def require_steps_on_shards(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer of torch that takes norms of whole weights: under sharding
    it would get those of this rank's shards (`DTensor.norm().item()`, torch 2.13).
    """
    if isinstance(optimizer, torch.optim.Adafactor | torch.optim.LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} needs whole weights, which zero3 shards; choose a wrapper "
            f"that does not shard weights"
        )


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard(sharded: Tensor) -> Tensor:
    """Returns this rank's shard of a sharded tensor, without autograd."""
    assert isinstance(sharded, DTensor), "the tensor is sharded"
    # to_local, which supports autograd, takes ten times as long; a step needs each weight's shard
    # four times.
    return sharded._local_tensor


def sharded_from_shard(like: Tensor, shard: Tensor) -> DTensor:
    """Returns a tensor that is sharded like `like`, such as its gradient, and of which this rank has
    `shard`. torch's fully_shard makes it so too: DTensor.from_local takes ten times as long.
    """
    assert isinstance(like, DTensor), "the tensor is sharded"
    return DTensor(shard, like._spec, requires_grad=False)


def sharded_from_whole(like: DTensor, whole: Tensor) -> DTensor:
    """Returns a tensor that all ranks have whole, sharded like `like`."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def sent_dtype(dtype: torch.dtype, compute_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which weights or gradients of a dtype are sent. Integer and complex
    tensors are not cast.
    """
    return compute_dtype if compute_dtype and dtype.is_floating_point else dtype


def free_memory(tensor: Tensor) -> None:
    """Frees the memory of a tensor that only this package uses, after waiting for the collective that
    read or wrote it. NCCL's works hold their tensors until its watchdog comes round: that took
    9.7 GiB at 2.7b on 2 × H200.
    """
    tensor.untyped_storage().resize_(0)


def flat_real(tensor: Tensor) -> Tensor:
    """Returns the tensor as one dimension of real values, which collectives accept."""
    flat = tensor.view(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
