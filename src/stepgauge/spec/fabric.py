"""How the GPUs of a machine are wired, as published: what collectives are priced by where nobody
has measured them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire:
    """What one GPU sends, in one direction.

    bytes_per_s  as published
    latency_us   of a small collective within a node; between nodes, of each doubling of their number
    efficiency   the part of it that a collective of many MB reaches
    source       of all three

    Raises ValueError for numbers that no wire has.
    """

    bytes_per_s: float
    latency_us: float
    efficiency: float
    source: str

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_us >= 0 and 0 < self.efficiency <= 1):
            raise ValueError(
                f"bytes_per_s is {self.bytes_per_s}, latency_us {self.latency_us}, efficiency "
                f"{self.efficiency}; accepted are above 0, at least 0, and above 0 to 1"
            )

    @property
    def reached_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.efficiency


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fabric:
    """Nodes of equal GPUs: wires within a node, and each GPU's share of those between nodes."""

    gpus_per_node: int
    within: Wire
    between: Wire

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node is {self.gpus_per_node}; it must be at least 1")

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Of its fields, as JSON has them. Raises ValueError for what is no fabric."""
        try:
            return cls(
                gpus_per_node=int(value["gpus_per_node"]),
                within=Wire(**value["within"]),
                between=Wire(**value["between"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a fabric: {error}") from None
