"""The time of an operation on a link as a function of its size.

Predictions interpolate between the measured sizes. A piecewise linear fit, alpha + beta·bytes, describes the
link in few numbers; cost/rates/link_fit.py makes it. Its errors at the measured sizes are kept, and thereby
the measured times. The fit alone is up to 51 % off at 16 MiB, the size of many buckets, between messages
bound by latency and by bandwidth (all_reduce of four H200s, hardware/h200-sxm.json).
"""

import bisect
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Self


@dataclasses.dataclass(frozen=True)
class Piece:
    """Time = alpha_ms + bytes / bytes_per_s, for sizes up to `to_bytes`; None: no limit."""

    alpha_ms: float
    bytes_per_s: float
    to_bytes: int | None = None

    def time_ms(self, size_bytes: float) -> float:
        return self.alpha_ms + size_bytes / self.bytes_per_s * 1e3


_RENAMED = {"asked": "settings"}  # fields of older files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """One operation between some ranks, measured and fitted.

    settings    the fields that all measured rows share: op, backend, algorithm, ranks, nodes, dtype,
                timing, device
    pieces      the fit, by ascending size
    range_bytes smallest and largest fitted size
    fitted      size -> relative error of the fit, for the sizes used in it
    held_out    the same for the sizes held out
    measured    date, versions and devices
    how         how it was fitted, in one sentence
    """

    settings: Mapping[str, Any]
    pieces: Sequence[Piece]
    range_bytes: tuple[int, int]
    fitted: Mapping[int, float]
    held_out: Mapping[int, float]
    measured: Mapping[str, Any]
    how: str = ""

    def time_ms(self, size_bytes: float) -> float:
        """Returns the predicted time: on a line between the measured sizes next to it. Smaller sizes take as
        long as the smallest; larger ones have the bandwidth of the last piece.
        """
        sizes, times = self._measured_times
        if not sizes:
            return self.fitted_ms(size_bytes)
        if size_bytes >= sizes[-1]:
            return times[-1] + (size_bytes - sizes[-1]) / self.pieces[-1].bytes_per_s * 1e3
        after = bisect.bisect(sizes, size_bytes)
        if after == 0:
            return times[0]
        share = (size_bytes - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return times[after - 1] + share * (times[after] - times[after - 1])

    @functools.cached_property
    def _measured_times(self) -> tuple[list[int], list[float]]:
        """The measured sizes in order, and their times in ms, which are made to never fall."""
        errors = sorted({**self.fitted, **self.held_out}.items())
        times = [self.fitted_ms(size) / (1 + error) for size, error in errors]
        return [size for size, _ in errors], list(itertools.accumulate(times, max))

    def fitted_ms(self, size_bytes: float) -> float:
        """Returns the time by the fit. The outer pieces are extrapolated beyond the fitted range."""
        for piece in self.pieces:
            if piece.to_bytes is None or size_bytes <= piece.to_bytes:
                return piece.time_ms(size_bytes)
        raise ValueError("the last piece of the link is limited")

    def held_out_error(self, least_bytes: int = 0, most_bytes: float = math.inf) -> float | None:
        """Returns the median absolute relative error on held-out sizes in this range, or None."""
        errors = [
            abs(error) for size, error in self.held_out.items() if least_bytes <= size < most_bytes
        ]
        return statistics.median(errors) if errors else None

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Reads the fields from JSON. Raises ValueError if they are not a link."""
        try:
            low, high = value["range_bytes"]
            converted = {
                "range_bytes": (low, high),
                "pieces": [Piece(**piece) for piece in value["pieces"]],
                "fitted": {int(size): error for size, error in value["fitted"].items()},
                "held_out": {int(size): error for size, error in value["held_out"].items()},
            }
            others = {_RENAMED.get(name, name): field for name, field in value.items()}
            return cls(**{**others, **converted})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a link: {error}") from None
