"""Reads a Chrome trace event by event, plain or gzipped, in constant memory."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

CHUNK = 1 << 15  # characters read at a time: small enough to stay in the CPU's caches
LAST_EVENT = 1 << 13  # characters at the end of a chunk, which usually contain a whole event
LONGEST = 1 << 26  # characters: a file with a longer event is damaged
LONGEST_LITERAL = len("-Infinity")
_DECODER = json.JSONDecoder()
_BLANK = " \t\n\r"
_BETWEEN_EVENTS = re.compile(r"\}\s*,(?=\s*\{)")


class TraceError(ValueError):
    """The file is not a trace, or does not have the requested data. The message is one sentence."""


class _Window:
    """The part of the text that is in memory."""

    def __init__(self, file: TextIO):
        self.file, self.text, self.at = file, "", 0
        self.fresh = False  # True if text was added since the last call of `events`

    def more(self) -> bool:
        """Reads more text. Returns False at the end of the file."""
        # Doubles the text, so that a long value is not parsed over and over again.
        chunk = self.file.read(max(CHUNK, len(self.text) - self.at))
        self.text = self.text[self.at :] + chunk
        self.at = 0
        self.fresh = True
        return bool(chunk)

    def peek(self) -> str:
        """Returns the next character that is not blank, "" at the end."""
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
        """Consumes and returns the next character, which must be one of those wanted."""
        character = self.peek()
        if not character:
            raise TraceError("ends in the middle: it was cut off")
        if character not in wanted:
            raise TraceError(
                f"is not a Chrome trace: it has {character!r} instead of {' or '.join(wanted)}"
            )
        self.at += 1
        return character

    def events(self) -> list[Any]:
        """Decodes all events that are complete in the text with one call, which is faster than one by
        one. Returns [] if that fails.

        The events are assumed to end at the last `}, {` of the text. If that is inside a string or an
        event, decoding fails.
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
            events: list[Any] = json.loads(f"[{self.text[self.at : brace + 1]}]")
        except (ValueError, RecursionError):
            return []
        self.at = after
        return events

    def value(self) -> Any:
        """Decodes and returns the next value."""
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
            # A number may continue in the next chunk.
            if end == len(self.text) and self.more():
                continue
            self.at = end
            return value


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (key, value) for the file's other entries and ("", event) for each event, in the file's
    order. Raises TraceError.

    Reads both of Chrome's formats: an object with a list `traceEvents`, and only the list.
    """
    try:
        with _opened(path) as file:
            window = _Window(file)
            yield from _parts(window)
            if (further := window.peek()) and further in "{[":
                raise TraceError("holds more than one trace, one after the other")
    except TraceError as error:
        raise TraceError(f"{path} {error}") from None
    except (EOFError, zlib.error):
        raise TraceError(f"{path} ends in the middle: its gzip data was cut off") from None
    except gzip.BadGzipFile as error:
        raise TraceError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from None


class _Gzip(gzip.GzipFile):
    """Ignores bytes after the compressed data, as gzip itself does: some copies have a trailer."""

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
    # The name of a kernel or range may have bytes that are not UTF-8; they are read as "\ufffd".
    file = _Gzip(path) if packed else io.BufferedReader(io.FileIO(path))
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace")


def _parts(window: _Window) -> Iterator[tuple[str, Any]]:
    first = window.peek()
    if not first:
        raise TraceError("is empty")
    if first == "\ufffd":
        raise TraceError("is not a Chrome trace: it is not text")
    if first == "[":
        yield from _events(window, may_end=True)
        return
    if first != "{":
        raise TraceError(f"is not a Chrome trace: it begins with {first!r}, not with {{ or [")
    window.take("{")
    has_events, separator = False, window.peek()
    while separator != "}":
        key = window.value()
        if not isinstance(key, str):
            raise TraceError("is not a Chrome trace: a key is not text")
        window.take(":")
        if key == "traceEvents":
            yield from _events(window)
            has_events = True
        else:
            yield key, window.value()
        separator = window.take(",}")
    if not has_events:
        raise TraceError("is not a Chrome trace: it has no traceEvents")


def _events(window: _Window, *, may_end: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields the events of a list. With `may_end`, the list may lack its closing bracket, which
    Chrome's format allows for a trace that is only a list.
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
