"""Parts of tensors that ranks share out, as DTensors, and how they are sent."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stepgauge.parallel.communication.collectives import reduce_scatter_flat
from stepgauge.parallel.communication.reducer import GradientReducer
from stepgauge.spec.units import ceil_div


class Sharding(GradientReducer):
    """The ranks that weights are sharded over."""

    def __init__(self, group: Any = None, device_type: str = "cpu"):
        super().__init__(group)
        # DTensor's caches take meshes of the same ranks and names for one, and would compute on the
        # first group of these ranks.
        names = None if self.group is dist.group.WORLD else (self.group.group_name,)
        self.mesh = DeviceMesh.from_group(self.group, device_type, mesh_dim_names=names)

    def __reduce__(self) -> Any:
        return Sharding, (None, self.mesh.device_type)

    def launch_scatter(self, slice_: Tensor, message: Tensor) -> Any:
        """The work of a reduce-scatter of the mean into this rank's slice, which uses the message
        up.
        """
        operation = self.begin_mean([message])
        return reduce_scatter_flat(slice_, message, group=self.group, op=operation, async_op=True)

    def shard(self, whole: Tensor) -> DTensor:
        """This rank's part of a tensor that all ranks have whole."""
        rows = self.rows(whole.shape[0])
        first = min(self.rank * rows, whole.shape[0])
        mine = whole[first : first + rows].contiguous().clone()
        return self.distributed(mine, whole.shape)

    def distributed(self, mine: Tensor, shape: torch.Size) -> DTensor:
        """The whole of that shape, of which this rank has `mine`."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            mine, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def rows(self, whole: int) -> int:
        """Rows of a rank's part, padding of the last ranks included."""
        return ceil_div(whole, self.ranks)


def require_steps_by_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer of torch that takes norms of whole weights, which are those
    of this rank's parts where weights are sharded (`DTensor.norm().item()`, torch 2.13).
    """
    if isinstance(optimizer, torch.optim.Adafactor | torch.optim.LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole weights, of which zero3 has parts; choose a "
            f"wrapper that leaves them whole"
        )


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: all, or its part of a sharded one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    assert isinstance(parameter, DTensor), "it is sharded"
    # to_local, which is for autograd, takes ten times as long, and a step asks for each weight's
    # four times.
    return parameter._local_tensor


def like(parameter: Tensor, mine: Tensor) -> DTensor:
    """Another tensor that is sharded as this one, such as its gradient, of which this rank has
    `mine`: torch's fully_shard makes it so too. DTensor.from_local takes ten times as long.
    """
    assert isinstance(parameter, DTensor), "it is sharded"
    return DTensor(mine, parameter._spec, requires_grad=False)


def sent_dtype(dtype: torch.dtype, compute_dtype: torch.dtype | None) -> torch.dtype:
    """The type in which weights or gradients of a type travel: integers and complex as they are."""
    return compute_dtype if compute_dtype and dtype.is_floating_point else dtype


def release(tensor: Tensor) -> None:
    """Gives the memory of a tensor of our own back, once what was sent from it or into it has been
    waited for. NCCL's works hold their tensors longer, until its watchdog comes round: 9.7 GiB at
    2.7b on 2 × H200.
    """
    tensor.untyped_storage().resize_(0)


def real(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
