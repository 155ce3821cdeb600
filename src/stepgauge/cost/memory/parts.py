"""The peak memory of a rank as a list of parts."""

import dataclasses
from collections.abc import Sequence

FORMULA, ASSUMED = "formula", "assumed"


@dataclasses.dataclass(frozen=True)
class Item:
    """A part of the peak."""

    name: str
    bytes: float
    source: str = FORMULA


@dataclasses.dataclass(frozen=True)
class Memory:
    """The peak on the fullest rank.

    items    parts of the peak that torch counts
    outside  memory that torch does not count
    moment   when the peak is reached
    """

    items: Sequence[Item]
    outside: Sequence[Item]
    moment: str

    @property
    def peak_bytes(self) -> float:
        return sum(item.bytes for item in self.items)

    @property
    def device_bytes(self) -> float:
        """The memory that the device must have."""
        return self.peak_bytes + sum(item.bytes for item in self.outside)

    def rows(self) -> list[list[object]]:
        """Returns a record's table of memory."""
        head: list[object] = ["part", "bytes", "source"]
        inside = [[item.name, item.bytes, item.source] for item in self.items]
        return [head, *inside, *([f"{i.name} (outside)", i.bytes, i.source] for i in self.outside)]
