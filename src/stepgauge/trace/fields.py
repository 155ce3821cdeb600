"""Parses fields of an event. In a trace, numbers may be text, and any field may be missing."""

import math
import re
from typing import Any

_LAST_DIGITS = re.compile(r"\d+$")
_WHOLE = re.compile(r"-?\d{1,20}")  # of 64 bits


def time(value: Any) -> float:
    """Returns a time in µs. Raises ValueError or TypeError for anything else, such as NaN."""
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError("not a number of microseconds")
    return result


def whole(value: Any) -> int | None:
    """Returns an integer, which may be text because some JSON readers cannot hold 64 bits."""
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else None


def track(value: Any) -> int:
    """Returns the number of a stream or device, such as 7 for "stream 7"; 0 if there is none."""
    number = whole(value)
    if number is None and isinstance(value, str) and (digits := _LAST_DIGITS.search(value)):
        number = int(digits[0])
    return number or 0


def key(value: Any) -> int | str:
    """Returns a hashable identifier of a process or thread."""
    return value if isinstance(value, int | str) else str(value)
