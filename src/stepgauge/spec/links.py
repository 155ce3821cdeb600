"""What an operation on a link costs, as a fitted function of its bytes: time = alpha + beta·bytes,
in pieces.

cost/rates/link_fit.py makes one from measured sizes.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Self


@dataclasses.dataclass(frozen=True)
class Piece:
    """`alpha_ms + bytes / bytes_per_s` up to `to_bytes`; the last piece has no end."""

    alpha_ms: float
    bytes_per_s: float
    to_bytes: int | None = None

    def time_ms(self, size_bytes: float) -> float:
        return self.alpha_ms + size_bytes / self.bytes_per_s * 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """One operation between some ranks, measured and fitted.

    asked       the fields of the rows that do not vary: op, backend, algorithm, ranks, nodes,
                dtype, timing, device
    pieces      the fit, by ascending size
    range_bytes smallest and largest size that was fitted
    fitted, held_out   size -> relative error of the fit, on the sizes that it saw and on those that
                       it did not
    measured    date, versions and devices
    how         in one sentence
    """

    asked: Mapping[str, Any]
    pieces: Sequence[Piece]
    range_bytes: tuple[int, int]
    fitted: Mapping[int, float]
    held_out: Mapping[int, float]
    measured: Mapping[str, Any]
    how: str = ""

    def time_ms(self, size_bytes: float) -> float:
        """The predicted time. Below and above the fitted range the outer pieces go on."""
        for piece in self.pieces:
            if piece.to_bytes is None or size_bytes <= piece.to_bytes:
                return piece.time_ms(size_bytes)
        raise ValueError("a link without a last piece")

    def held_out_error(self, least_bytes: int = 0, most_bytes: float = math.inf) -> float | None:
        """Median absolute relative error on held-out sizes within the limits; None without any."""
        errors = [
            abs(error) for size, error in self.held_out.items() if least_bytes <= size < most_bytes
        ]
        return statistics.median(errors) if errors else None

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Of its fields, as JSON has them. Raises ValueError for what is no link."""
        try:
            low, high = value["range_bytes"]
            read = {
                "range_bytes": (low, high),
                "pieces": [Piece(**piece) for piece in value["pieces"]],
                "fitted": {int(size): error for size, error in value["fitted"].items()},
                "held_out": {int(size): error for size, error in value["held_out"].items()},
            }
            return cls(**{**value, **read})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a link: {error}") from None
