"""What collectives take between the ranks of an axis: measured, or by the formula of a ring on
published wires.

Ranks are numbered as in a device mesh, tensor fastest, then context, data and pipeline; a node has the
first ones. A ring over several nodes leaves each of them as often as it has ranks there, so that
ranks of a group share no wire between nodes: its rate is the smaller of the wire within a node and
of all its ranks' wires out of it.
"""

import dataclasses
import math
from collections.abc import Mapping

from stepgauge.cost.rates.estimate import ASSUMED, CALIBRATED, Estimate
from stepgauge.spec.fabric import Fabric
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout

# Of a ring of n ranks, the times that each byte of the whole tensor is sent, over (n-1)/n; NCCL's
# bus bandwidth is defined with the same factors.
SENDS: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclasses.dataclass(frozen=True)
class Axis:
    """So many ranks, `in_node` of them on each node."""

    ranks: int
    in_node: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.in_node)


def axes_of(layout: Layout, gpus_per_node: int) -> dict[str, Axis]:
    """The axes of a layout as they lie on nodes of so many GPUs."""
    inner = layout.tensor * layout.num_replicas
    # ranks of each, and those between one of them and the next; gradients are averaged over all
    # replicas, also those that share sequences
    sizes = {
        "tensor": (layout.tensor, 1),
        "context": (layout.context, layout.tensor),
        "data": (layout.num_replicas, layout.tensor),
        "pipeline": (layout.pipeline, inner),
    }
    return {
        name: Axis(ranks, max(1, min(ranks, gpus_per_node // apart)))
        for name, (ranks, apart) in sizes.items()
    }


class Links:
    """The links and the fabric of a hardware file."""

    def __init__(self, hardware: HardwareFile):
        self._hardware = hardware
        wired = hardware.other.get("fabric")
        self.fabric = Fabric.from_dict(wired) if wired else None

    @property
    def gpus_per_node(self) -> int:
        """Without a fabric all ranks are on one node: links say of how many."""
        return self.fabric.gpus_per_node if self.fabric else 2**30

    def is_measured(self, operation: str, axis: Axis, *, backend: str = "nccl") -> bool:
        link = self._hardware.link(op=operation, backend=backend, ranks=axis.ranks)
        return link is not None and axis.nodes == 1

    def collective(
        self, operation: str, nbytes: float, axis: Axis, *, backend: str = "nccl"
    ) -> Estimate:
        """Of a tensor of so many bytes as a whole. Raises ValueError where neither a link nor a
        fabric says what it takes.
        """
        if axis.ranks == 1:
            return Estimate(0.0, CALIBRATED)
        measured = self._hardware.link(op=operation, backend=backend, ranks=axis.ranks)
        if measured is not None and axis.nodes == 1:
            return Estimate(measured.time_ms(nbytes) * 1e3, CALIBRATED)
        if self.fabric is None:
            raise ValueError(
                f"the hardware file {self._hardware.name} has no {operation} between {axis.ranks} "
                f"ranks; stepgauge calibrate --ranks {axis.ranks} measures it"
            )
        latency, rate = self._ring(axis, self.fabric)
        sent = SENDS[operation] * nbytes * (axis.ranks - 1) / axis.ranks
        return Estimate(latency + sent / rate * 1e6, ASSUMED)

    def transfer(self, nbytes: float, axis: Axis, *, backend: str = "nccl") -> Estimate:
        """From a rank to its neighbour on the axis, which may be on the next node."""
        if axis.ranks == 1:
            return Estimate(0.0, CALIBRATED)
        measured = self._hardware.link(op="send_recv", backend=backend)
        if measured is not None and axis.nodes == 1:
            return Estimate(measured.time_ms(nbytes) * 1e3, CALIBRATED)
        if self.fabric is None:
            raise ValueError(
                f"the hardware file {self._hardware.name} has no send_recv; stepgauge calibrate "
                f"--ranks 2 measures it"
            )
        wire = self.fabric.within if axis.nodes == 1 else self.fabric.between
        return Estimate(wire.latency_us + nbytes / wire.reached_bytes_per_s * 1e6, ASSUMED)

    def _ring(self, axis: Axis, fabric: Fabric) -> tuple[float, float]:
        """Microseconds before the first byte, and bytes a second."""
        within = fabric.within.reached_bytes_per_s
        if axis.nodes == 1:
            return fabric.within.latency_us, within
        out = axis.in_node * fabric.between.reached_bytes_per_s
        latency = fabric.within.latency_us + fabric.between.latency_us * math.log2(axis.nodes)
        return latency, min(within, out) if axis.in_node > 1 else out
