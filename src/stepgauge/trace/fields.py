"""Fields of an event as the trace has them: numbers may be text, and anything may be missing."""

import math
import re
from typing import Any

_LAST_DIGITS = re.compile(r"\d+$")
_WHOLE = re.compile(r"-?\d{1,20}")  # of 64 bits


def time(value: Any) -> float:
    """µs. Raises ValueError or TypeError for what is no time: text, null, NaN, infinity."""
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError("no number of microseconds")
    return result


def whole(value: Any) -> int | None:
    """A whole number, which may be text (64 bits are too many for some readers of JSON)."""
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else None


def track(value: Any) -> int:
    """The number of a stream or device: of "stream 7" 7; 0 of what has none."""
    number = whole(value)
    if number is None and isinstance(value, str) and (found := _LAST_DIGITS.search(value)):
        number = int(found[0])
    return number or 0


def key(value: Any) -> int | str:
    """What tells a process or thread apart."""
    return value if isinstance(value, int | str) else str(value)
