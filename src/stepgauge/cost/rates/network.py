"""The time of collectives between the ranks of an axis: measured, or by formula from published wires.

Ranks are numbered as in a device mesh: tensor fastest, then context, data and pipeline. A node has
consecutive ranks. By formula, a collective runs in a ring. A ring over several nodes leaves each node
as often as it has ranks there, so that no two ranks share a wire between nodes. Its rate is the smaller
of the wire within a node and of all the node's wires together.
"""

import dataclasses
import math
from collections.abc import Mapping

from stepgauge.cost.rates.estimate import ASSUMED, CALIBRATED, Estimate
from stepgauge.spec.comm import COPIES
from stepgauge.spec.fabric import Fabric
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.links import Link

# In a ring of n ranks, each rank sends this many times (n-1)/n of the whole tensor. NCCL's bus
# bandwidth is defined with the same factors.
SENDS: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclasses.dataclass(frozen=True)
class Axis:
    """The number of ranks on an axis, and how many of them are on each node."""

    ranks: int
    in_node: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.in_node)


def axes_of(layout: Layout, gpus_per_node: int) -> dict[str, Axis]:
    """Returns the axes of a layout, placed on nodes of `gpus_per_node`."""
    # Ranks per axis, and the distance between neighbours. Gradients are averaged over all replicas,
    # which includes context-parallel ranks.
    sizes = {
        "tensor": (layout.tensor, 1),
        "context": (layout.context, layout.tensor),
        "data": (layout.num_replicas, layout.tensor),
        "pipeline": (layout.pipeline, layout.tensor * layout.num_replicas),
    }
    return {
        name: Axis(ranks, max(1, min(ranks, gpus_per_node // distance)))
        for name, (ranks, distance) in sizes.items()
    }


class Links:
    """The measured links and the published fabric of a hardware file.

    Raises ValueError for an invalid fabric.
    """

    def __init__(self, hardware: HardwareFile):
        self._hardware = hardware
        fabric = hardware.other.get("fabric")
        try:
            self.fabric = Fabric.from_dict(fabric) if fabric else None
        except ValueError as error:
            raise ValueError(f"the hardware file {hardware.name}: {error}") from None

    @property
    def gpus_per_node(self) -> int:
        """Without a fabric, all ranks are on one node; links have their own number of ranks."""
        return self.fabric.gpus_per_node if self.fabric else 2**30

    def is_measured(self, operation: str, axis: Axis, *, backend: str = "nccl") -> bool:
        return self._measured(operation, axis, backend) is not None

    def _measured(self, operation: str, axis: Axis, backend: str, **settings: str) -> Link | None:
        """Returns the link measured for these ranks; links hold within a node only."""
        if axis.nodes > 1:
            return None
        ranks = {} if operation == "send_recv" else {"ranks": axis.ranks}
        return self._hardware.link(op=operation, backend=backend, **ranks, **settings)

    def by_copies(self, operation: str, nbytes: float, axis: Axis) -> Estimate | None:
        """Returns the time of a collective by copy engines (bench comm --backend copies), in which senders
        write into the receivers' memory; None if the hardware file has no such link, or nothing is sent.
        """
        link = self._measured(operation, axis, COPIES, algorithm="push") if axis.ranks > 1 else None
        return Estimate(link.time_ms(nbytes) * 1e3, CALIBRATED) if link else None

    def _remedy(self, ranks: int) -> str:
        """Returns how to get the time of a link that the hardware file does not have."""
        measured = f"stepgauge calibrate --ranks {ranks} measures it"
        if self._hardware.device_kind == "cpu":
            return measured
        return (
            f"{measured} on that machine. Without the machine, choose one whose links are known from "
            "its data sheet: dgx-a100, dgx-h100 or dgx-h200"
        )

    def collective(
        self, operation: str, nbytes: float, axis: Axis, *, backend: str = "nccl"
    ) -> Estimate:
        """Returns the time of a collective whose whole tensor has `nbytes`.

        Raises ValueError if the hardware file has neither such a link nor a fabric.
        """
        if axis.ranks == 1:
            return Estimate(0.0, CALIBRATED)
        if link := self._measured(operation, axis, backend):
            return Estimate(link.time_ms(nbytes) * 1e3, CALIBRATED)
        if self.fabric is None:
            raise ValueError(
                f"the hardware file {self._hardware.name} has no {operation} between {axis.ranks} "
                f"ranks; {self._remedy(axis.ranks)}"
            )
        latency_us, bytes_per_s = self._ring(axis, self.fabric)
        sent = SENDS[operation] * nbytes * (axis.ranks - 1) / axis.ranks
        return Estimate(latency_us + sent / bytes_per_s * 1e6, ASSUMED)

    def transfer(self, nbytes: float, axis: Axis, *, backend: str = "nccl") -> Estimate:
        """Returns the time to send `nbytes` to the next rank of the axis, maybe on the next node.

        Raises ValueError as `collective` does.
        """
        if axis.ranks == 1:
            return Estimate(0.0, CALIBRATED)
        if link := self._measured("send_recv", axis, backend):
            return Estimate(link.time_ms(nbytes) * 1e3, CALIBRATED)
        if self.fabric is None:
            raise ValueError(
                f"the hardware file {self._hardware.name} has no send_recv; {self._remedy(2)}"
            )
        wire = self.fabric.within if axis.nodes == 1 else self.fabric.between
        return Estimate(wire.latency_us + nbytes / wire.reached_bytes_per_s * 1e6, ASSUMED)

    def _ring(self, axis: Axis, fabric: Fabric) -> tuple[float, float]:
        """Returns a ring's latency in microseconds, and the bytes per second that a rank sends."""
        within = fabric.within.reached_bytes_per_s
        if axis.nodes == 1:
            return fabric.within.latency_us, within
        between = axis.in_node * fabric.between.reached_bytes_per_s
        latency_us = fabric.within.latency_us + fabric.between.latency_us * math.log2(axis.nodes)
        return latency_us, min(within, between) if axis.in_node > 1 else between
