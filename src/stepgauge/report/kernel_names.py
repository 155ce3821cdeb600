"""Shortens the names of kernels and ranges for tables."""

import functools
import re
from collections.abc import Iterator
from typing import Any

from stepgauge.report.numbers import truncated

# Template arguments that are left out first: numbers and plain types.
_PLAIN = re.compile(
    r"-?\d\w*|true|false|(unsigned |signed )?(char|short|int|long|float|double|bool)( int| long)?|"
    r"(c10|at)::\w+|__nv_\w+|__hip_\w+|__half|[\w:]*(Array|OffsetCalculator|Loader|Storer|LoadWithoutCast|"
    r"StoreWithoutCast)"
)
_Pieces = list[Any]  # a parsed name: texts, and lists of template arguments
LONGEST_NAME, LONGEST_RANGE = 72, 56


def range_name(range: str) -> str:
    """Returns the range's name, shortened to its innermost modules if it is too long."""
    if len(range) <= LONGEST_RANGE:
        return range
    start = range.find(".", len(range) - LONGEST_RANGE)
    return f"…{range[start + 1 :]}" if start >= 0 else f"…{range[1 - LONGEST_RANGE :]}"


@functools.cache
def short_name(name: str, longest: int = LONGEST_NAME) -> str:
    """Returns a C++ name, shortened if it is too long: plain template arguments are left out first,
    then the innermost ones. Templates stay closed.
    """
    if len(name) <= longest:
        return name
    pieces = _parsed(iter(name))
    for deepest in range(6, 0, -1):
        short = _written(pieces, deepest)
        if len(short) <= longest:
            return short
    return truncated(name, longest)


def _parsed(characters: Iterator[str], end: str = "") -> _Pieces:
    """Parses a name up to the end of its template: texts and lists of arguments alternate."""
    arguments: list[_Pieces] = [[""]]
    parentheses, before = 0, ""
    for character in characters:
        parentheses += {"(": 1, ")": -1}.get(character, 0)
        if character == "<" and not parentheses:
            arguments[-1] += [_parsed(characters, ">"), ""]
        elif character == end and not parentheses and before != "-":
            break
        elif character == "," and end and not parentheses:
            arguments.append([""])
        else:
            arguments[-1][-1] += character
        before = character
    return arguments if end else arguments[0]


def _written(pieces: _Pieces, deepest: int) -> str:
    """Returns the name without plain arguments and without arguments nested deeper than `deepest`."""
    parts = []
    for piece in pieces:
        if isinstance(piece, str):
            parts.append(piece.partition("(")[0])  # drops the parameters of a function argument
            continue
        kept = (
            [arg for arg in piece if not _PLAIN.fullmatch(str(arg[0]).strip())]
            if deepest > 1
            else []
        )
        shown = [_written(argument, deepest - 1).strip() for argument in kept]
        parts.append(f"<{', '.join([*shown, *(['…'] if len(kept) < len(piece) else [])])}>")
    return "".join(parts)
