"""A Chrome trace read event by event, plain or gzip: memory does not grow with the file."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

CHUNK = 1 << 15  # characters read at a time: what is decoded together stays in the caches
LAST_EVENT = 1 << 13  # characters at the end of a chunk that hold a whole event, as a rule
LONGEST = 1 << 26  # characters of one event; more is no trace but a damaged file
LONGEST_LITERAL = len("-Infinity")
_DECODER = json.JSONDecoder()
_BLANK = " \t\n\r"
_BETWEEN_EVENTS = re.compile(r"\}\s*,(?=\s*\{)")


class TraceError(ValueError):
    """A file that is no trace, or one without what was asked of it; the message is one sentence."""


class _Window:
    """The part of the text that is being read."""

    def __init__(self, file: TextIO):
        self.file, self.text, self.at = file, "", 0
        self.fresh = False  # text came in since `events` last looked

    def more(self) -> bool:
        # As much again as is there, so that a long value is not begun over and over.
        chunk = self.file.read(max(CHUNK, len(self.text) - self.at))
        self.text = self.text[self.at :] + chunk
        self.at = 0
        self.fresh = True
        return bool(chunk)

    def peek(self) -> str:
        """The next character that is not blank, "" at the end."""
        while True:
            text, at = self.text, self.at
            while at < len(text) and text[at] in _BLANK:
                at += 1
            self.at = at
            if at < len(text):
                return text[at]
            if not self.more():
                return ""

    def take(self, wanted: str) -> str:
        """Steps over one of the wanted characters."""
        found = self.peek()
        if not found:
            raise TraceError("ends in the middle: it was cut off")
        if found not in wanted:
            raise TraceError(
                f"is no Chrome trace: {found!r} stands where {' or '.join(wanted)} should"
            )
        self.at += 1
        return found

    def events(self) -> list[Any]:
        """The events that the text holds whole, decoded in one call; none where that cannot be.

        They end where one object follows another for the last time. If that place is none between
        events, but in a string or within an event, what stands before it is no whole list.
        """
        if not self.fresh:
            return []
        self.fresh = False
        start = max(self.at, len(self.text) - LAST_EVENT)
        places = [place.span() for place in _BETWEEN_EVENTS.finditer(self.text, start)]
        if not places:
            return []
        brace, after = places[-1]
        try:
            found: list[Any] = json.loads(f"[{self.text[self.at : brace + 1]}]")
        except (ValueError, RecursionError):
            return []
        self.at = after
        return found

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if len(self.text) - self.at > LONGEST:
                    raise TraceError(
                        f"is damaged: {error.msg} in an event of over {LONGEST:,} characters"
                    ) from None
                left = len(self.text) - error.pos
                if self.more():
                    continue
                cut = left <= LONGEST_LITERAL or error.msg.startswith("Unterminated")
                raise TraceError(
                    "ends in the middle: it was cut off" if cut else f"is damaged: {error.msg}"
                ) from None
            except (ValueError, RecursionError):
                raise TraceError(
                    "is damaged: values are nested too deeply, or a number has thousands of digits"
                ) from None
            # A number may go on in the next chunk.
            if end == len(self.text) and self.more():
                continue
            self.at = end
            return value


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """(key, value) for what the file says about itself, ("", event) for each event, in the file's
    order.

    Both of Chrome's formats: an object with a list `traceEvents`, and the list alone. Raises
    TraceError.
    """
    try:
        with _opened(path) as file:
            window = _Window(file)
            yield from _parts(window)
            if (further := window.peek()) and further in "{[":
                raise TraceError("holds more than one trace: one begins where another ends")
    except TraceError as error:
        raise TraceError(f"{path} {error}") from None
    except (EOFError, zlib.error):
        raise TraceError(f"{path} ends in the middle: its gzip data was cut off") from None
    except gzip.BadGzipFile as error:
        raise TraceError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from None


class _Gzip(gzip.GzipFile):
    """Bytes after the packed data are left out, as gzip itself does: some copies have a trailer."""

    def read1(self, size: int = -1) -> bytes:
        try:
            return super().read1(size)
        except gzip.BadGzipFile as error:
            if self.tell() and str(error).startswith("Not a gzipped file"):
                return b""
            raise


def _opened(path: Path) -> TextIO:
    with path.open("rb") as start:
        packed = start.read(2) == b"\x1f\x8b"
    # A name of a kernel or range may hold bytes that are no text; they are read as "\ufffd".
    file = _Gzip(path) if packed else io.BufferedReader(io.FileIO(path))
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace")


def _parts(window: _Window) -> Iterator[tuple[str, Any]]:
    first = window.peek()
    if not first:
        raise TraceError("is empty")
    if first == "\ufffd":
        raise TraceError("is no Chrome trace: it is no text")
    if first == "[":
        yield from _events(window, may_end=True)
        return
    if first != "{":
        raise TraceError(f"is no Chrome trace: it begins with {first!r}, a trace with {{ or [")
    window.take("{")
    found, separator = False, window.peek()
    while separator != "}":
        key = window.value()
        if not isinstance(key, str):
            raise TraceError("is no Chrome trace: a key is no text")
        window.take(":")
        if key == "traceEvents":
            yield from _events(window)
            found = True
        else:
            yield key, window.value()
        separator = window.take(",}")
    if not found:
        raise TraceError("is no Chrome trace: it has no traceEvents")


def _events(window: _Window, *, may_end: bool = False) -> Iterator[tuple[str, Any]]:
    """`may_end`: after any event. Chrome's format lets the list alone go without its bracket, for
    programs that end early.
    """
    window.take("[")
    if window.peek() == "]":
        window.take("]")
        return
    while True:
        for event in window.events():
            yield "", event
        if may_end and not window.peek():
            return
        yield "", window.value()
        if may_end and not window.peek():
            return
        if window.take(",]") == "]":
            return
