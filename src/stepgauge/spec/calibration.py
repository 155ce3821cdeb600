"""What a calibration measures: single operations over a grid of shapes, as tables of times."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from stepgauge.spec.fields import check, option


@dataclasses.dataclass(frozen=True)
class OperationTable:
    """Times of one operation.

    axes  what the sizes of a row are: ("m", "n", "k") of a product
    rows  sizes, then microseconds
    """

    axes: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]

    def to_json(self) -> dict[str, Any]:
        return {"axes": list(self.axes), "rows": [list(row) for row in self.rows]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Raises ValueError for what is no table."""
        try:
            axes, rows = tuple(value["axes"]), tuple(tuple(row) for row in value["rows"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a table of an operation: {error}") from None
        if not rows or any(len(row) != len(axes) + 1 for row in rows):
            raise ValueError(f"not a table of an operation: rows need {len(axes)} sizes and a time")
        return cls(axes, rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationSpec:
    """What `calibrate` measures in one record: an operation in a type, over all shapes."""

    kind: ClassVar[str] = "calibration"

    operation: str = option("matmul nt bf16", "operation and type", label=True)
    milliseconds: float = option(4.0, "of work that each shape is timed for", least=0.0, most=1e4)
    device: str = option("cpu", "cpu, cuda, cuda:1, mps; auto takes the fastest there is")

    def __post_init__(self) -> None:
        check(self)
