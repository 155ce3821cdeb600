"""Published interconnects of a machine: the basis for the cost of collectives without measurements."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from stepgauge.spec.fields import check


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
        if not (self.bytes_per_s > 0 and self.latency_us >= 0 and 0 < self.efficiency <= 1):
            raise ValueError(
                f"bytes_per_s is {self.bytes_per_s}, latency_us {self.latency_us}, efficiency "
                f"{self.efficiency}; they must be above 0, at least 0, and above 0 up to 1"
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
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Reads the fields from JSON. Raises ValueError if they are not a fabric."""
        try:
            fields = _fields(cls, value)
            wires = {name: _wire(name, fields[name]) for name in ("within", "between")}
            return cls(gpus_per_node=fields["gpus_per_node"], **wires)
        except ValueError as error:
            raise ValueError(f"not a fabric: {error}") from None


def _wire(name: str, value: Any) -> Wire:
    try:
        return Wire(**_fields(Wire, value))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _fields(kind: type, value: Any) -> dict[str, Any]:
    """Returns a JSON object's values. Raises ValueError unless it has the fields of the dataclass."""
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(value, Mapping) or value.keys() != names:
        found = ", ".join(value) if isinstance(value, Mapping) else repr(value)
        raise ValueError(f"it needs {', '.join(sorted(names))}; it has {found or 'none of them'}")
    return dict(value)
