"""How figures and their headings are written: the one place that rounds."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from stepgauge.spec.units import GIB, MIB


class Doubtful(float):
    """A figure of a row that was disturbed: tables and plots write † behind it."""


@dataclasses.dataclass(frozen=True)
class Heading:
    text: str
    scale: float = 1.0


# What a unit of a Sample is written in, where that is another one.
_UNITS: Mapping[str, Heading] = {
    "us": Heading("µs"),
    "bytes": Heading("GiB", 2.0**-30),
    "fraction of dense peak": Heading("%", 100.0),
    "signed fraction": Heading("%", 100.0),
}
_NAMES = {
    "algbw_gb_per_s": "algbw GB/s",
    "busbw_gb_per_s": "busbw GB/s",
    "gb_per_s": "GB/s",
    "mfu": "MFU %",
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
    return f"{name} {_UNITS[unit].text if unit in _UNITS else unit}".strip()


def scaled(value: float | None, unit: str) -> float | None:
    """The value in the unit of its heading: bytes in GiB, fractions in %."""
    return value if value is None or unit not in _UNITS else value * _UNITS[unit].scale


def number(value: float | None, unit: str = "") -> str:
    """Four significant digits, thousands separated; nothing for None. An exponent below 1e-5."""
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
    """A time for people, in its largest unit of which there are two or more."""
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds:.0f} s"


def cut_to(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def whole(value: float) -> float:
    """A count as an int, which is written without decimals, where it comes to a whole number."""
    return int(value) if float(value).is_integer() else value


@dataclasses.dataclass(frozen=True)
class SizeUnit:
    """What a table's sizes are written in."""

    text: str
    bytes: int

    def value(self, size: float | None) -> float | None:
        return None if size is None else size / self.bytes

    def of(self, size: float | None) -> str:
        return number(self.value(size))


def size_unit(sizes: Iterable[float | None]) -> SizeUnit:
    """GiB; MiB or KiB where all sizes are below a GiB or MiB."""
    largest = max((size for size in sizes if size is not None), default=0.0)
    units = (SizeUnit("GiB", GIB), SizeUnit("MiB", MIB), SizeUnit("KiB", 2**10))
    return next(
        (unit for unit in units if largest >= unit.bytes), units[-1] if largest else units[0]
    )
