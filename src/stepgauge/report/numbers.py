"""Formats figures and their headings. Rounding happens only here."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from stepgauge.spec.units import GIB, MIB


class Doubtful(float):
    """A figure from a disturbed measurement. Tables and plots mark it with †."""


# Units of a Sample that are shown as another unit, with the factor to multiply by.
_UNITS: Mapping[str, tuple[str, float]] = {
    "us": ("µs", 1.0),
    "bytes": ("GiB", 2.0**-30),
    "fraction of dense peak": ("%", 100.0),
    "signed fraction": ("%", 100.0),
    "fraction of the step": ("%", 100.0),
}
_NAMES = {
    "algbw_gb_per_s": "algbw GB/s",
    "busbw_gb_per_s": "busbw GB/s",
    "gb_per_s": "GB/s",
    "mfu": "MFU %",
    "spread": "± %",
    "of_bound": "of the bound",
    "of_host_link": "of one host link",
    "tflop_per_s": "TFLOP/s",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
}
_RATES = ("_gb_per_s", "_tflop_per_s")


def heading(metric: str, unit: str) -> str:
    """`forward_ms` -> "forward ms", `peak_bytes` -> "peak GiB"."""
    if metric in _NAMES:
        return _NAMES[metric]
    name = metric.removesuffix(f"_{unit}")
    for rate in _RATES:
        name = name.removesuffix(rate)
    name = name.replace("_", " ")
    return f"{name} {_UNITS[unit][0] if unit in _UNITS else unit}".strip()


def scaled(value: float | None, unit: str) -> float | None:
    """Returns the value in the unit of its heading: bytes in GiB, fractions in %."""
    return value if value is None or unit not in _UNITS else value * _UNITS[unit][1]


def number(value: float | None, unit: str = "") -> str:
    """Returns four significant digits with thousands separators, an exponent if below 1e-5, and ""
    for None.
    """
    value = scaled(value, unit)
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if abs(value) < 1e-5:
        return f"{value:.1e}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def duration(seconds: float) -> str:
    """Returns "90 s", "5 minutes", "3 hours": in the largest unit of which there are at least two."""
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds:.0f} s"


def truncated(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def whole(value: float) -> float:
    """Returns a whole number as an int, so that counts are shown without decimals."""
    return int(value) if float(value).is_integer() else value


@dataclasses.dataclass(frozen=True)
class SizeUnit:
    """The unit for the sizes of one table."""

    text: str
    bytes: int

    def value(self, size: float | None) -> float | None:
        return None if size is None else size / self.bytes

    def format(self, size: float) -> str:
        return f"{number(self.value(size))} {self.text}"


def size_unit(sizes: Iterable[float | None]) -> SizeUnit:
    """Returns GiB, or MiB or KiB if all sizes are below one GiB or MiB."""
    largest = max((size for size in sizes if size is not None), default=0.0)
    units = (SizeUnit("GiB", GIB), SizeUnit("MiB", MIB), SizeUnit("KiB", 2**10))
    return next(
        (unit for unit in units if largest >= unit.bytes), units[-1] if largest else units[0]
    )
