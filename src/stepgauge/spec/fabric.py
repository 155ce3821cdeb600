"""Published interconnects of a machine: the basis for the cost of collectives without measurements."""

import dataclasses
from typing import Any, Self

from stepgauge.spec.fields import check
from stepgauge.spec.json_objects import read_object, require_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire:
    """The bandwidth of one GPU in one direction.

    bytes_per_s  published bandwidth
    latency_us   within a node: latency of a small collective; between nodes: latency per doubling
                 of the number of nodes
    efficiency   fraction of the bandwidth that a collective of many MB reaches
    source       source of all three

    Raises ValueError for impossible values.
    """

    bytes_per_s: float
    latency_us: float
    efficiency: float
    source: str

    def __post_init__(self) -> None:
        check(self)
        if self.bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}; it must be above 0")
        if self.latency_us < 0:
            raise ValueError(f"latency_us is {self.latency_us}; it must be at least 0")
        if not 0 < self.efficiency <= 1:
            raise ValueError(
                f"efficiency is {self.efficiency}; it must be above 0 and at most 1: 0.8 is 80 %"
            )

    @property
    def reached_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.efficiency


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fabric:
    """Nodes of equal GPUs. `between` is each GPU's share of the network between nodes."""

    gpus_per_node: int
    within: Wire
    between: Wire

    def __post_init__(self) -> None:
        check(self)
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node is {self.gpus_per_node}; it must be at least 1")

    @classmethod
    def from_dict(cls, value: Any) -> Self:
        """Reads the fields from JSON. Raises ValueError, with the path of the key, for any other value."""
        names = [field.name for field in dataclasses.fields(cls)]
        require_keys(value, "fabric", names, known=names)
        wires = {
            name: read_object(Wire, value[name], f"fabric.{name}") for name in ("within", "between")
        }
        return read_object(cls, value, "fabric", objects=wires)
