"""The sharded storage of weights that are gathered together, and the averaging of their gradients."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stepgauge.parallel.collectives import all_gather_flat
from stepgauge.parallel.messages import Averager
from stepgauge.spec.plan.buckets import Parameter
from stepgauge.spec.plan.shards import plan_unit

MOST_IN_FLIGHT = 2  # units whose whole gradients wait to be averaged: more only takes memory


class Unit:
    """Matrices one behind the other in a flat storage, of which this rank keeps its slice as
    `shard`, of shape (1, n).

    compute_dtype  what the whole weights are gathered in, and their gradients averaged
    """

    def __init__(
        self,
        described: Sequence[Parameter],
        parameters: Sequence[nn.Parameter],
        averager: Averager,
        compute_dtype: torch.dtype | None,
    ):
        self.averager = averager
        self.rank = dist.get_rank(averager.group)
        self.plan = plan_unit(described, ranks=averager.ranks)
        self.names = [parameter.name for parameter in described]
        self.shapes = [parameter.shape for parameter in parameters]
        self.compute_dtype = compute_dtype or parameters[0].dtype
        mine = self.slice_values([parameter.detach() for parameter in parameters])
        self.shard = nn.Parameter(mine, requires_grad=parameters[0].requires_grad)

    def slice_values(self, values: Sequence[Tensor]) -> Tensor:
        """This rank's slice of whole values of the weights' shapes, as `shard` is laid out."""
        mine = torch.zeros(self.plan.shard_elements, dtype=values[0].dtype, device=values[0].device)
        own = self.plan.slice_of(self.rank)
        for slot, value in zip(self.plan.slots, values, strict=True):
            start, end = max(own.start, slot.start), min(own.stop, slot.end)
            if start < end:
                mine[start - own.start : end - own.start] = value.reshape(-1)[
                    start - slot.start : end - slot.start
                ]
        return mine[None]

    def start_gather(self, dtype: torch.dtype) -> tuple[dist.Work, Tensor]:
        """The work that fills the whole storage with the weights, and the storage."""
        return self._start(self.shard.detach().flatten().to(dtype))

    def gather(self, dtype: torch.dtype) -> Tensor:
        work, flat = self.start_gather(dtype)
        work.wait()
        return flat

    def gather_values(self, slice_: Tensor) -> Tensor:
        """The whole storage of any slices that are laid out as `shard` is."""
        work, flat = self._start(slice_.flatten())
        work.wait()
        return flat

    def _start(self, slice_: Tensor) -> tuple[dist.Work, Tensor]:
        dtype = slice_.dtype
        flat = torch.empty(self.plan.elements, dtype=dtype, device=slice_.device)
        work = all_gather_flat(flat, slice_, group=self.averager.group, async_op=True)
        assert work is not None, "it is asynchronous"
        return work, flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """The weights in a whole storage."""
        return [
            flat[slot.start : slot.end].view(s)
            for slot, s in zip(self.plan.slots, self.shapes, strict=True)
        ]

    def distributed(self, values: Tensor, mesh: DeviceMesh) -> DTensor:
        """This rank's slice of weights or of their optimizer state as part of the whole, without
        padding.
        """
        own = self.plan.slice_of(self.rank)
        used = values.flatten()[: own.stop - own.start]
        shape = torch.Size((self.plan.used,))
        return DTensor.from_local(used, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


class Reductions:
    """Averages whole gradients into the ranks' slices while backward goes on."""

    def __init__(self, averager: Averager):
        self.averager = averager
        self._in_flight: list[tuple[dist.Work, Unit, Tensor]] = []

    def start(self, unit: Unit, gradients: Sequence[Tensor | None]) -> None:
        """Sends the gradients of a unit's weights; None counts as zero."""
        whole = _in_one(unit, gradients)
        slice_ = torch.empty(unit.plan.shard_elements, dtype=whole.dtype, device=whole.device)
        self._in_flight.append((self.averager.launch_scatter(slice_, whole), unit, slice_))
        while len(self._in_flight) > MOST_IN_FLIGHT:
            self._collect()

    def finish(self) -> None:
        while self._in_flight:
            self._collect()

    @torch.no_grad()
    def _collect(self) -> None:
        work, unit, slice_ = self._in_flight.pop(0)
        work.wait()
        gradient = slice_.to(unit.shard.dtype)[None]
        unit.shard.grad = gradient if unit.shard.grad is None else unit.shard.grad + gradient


def _in_one(unit: Unit, gradients: Sequence[Tensor | None]) -> Tensor:
    """The gradients as the unit's flat storage lies; a single one that fills it is taken where it
    is.
    """
    first = gradients[0]
    if (
        len(gradients) == 1
        and first is not None
        and first.is_contiguous()
        and unit.plan.elements == first.numel()
    ):
        return first.flatten()
    flat = torch.zeros(unit.plan.elements, dtype=unit.compute_dtype, device=unit.shard.device)
    for view, gradient in zip(unit.views(flat), gradients, strict=True):
        if gradient is not None:
            view.copy_(gradient)
    return flat
