"""Progress messages of long measurements. They are dropped if the process has no listener."""

import contextlib
import time
from collections.abc import Callable, Iterator

Listener = Callable[[str], None]
EVERY_S = 0.5  # least time between two counts
_listeners: list[Listener] = []
_last = 0.0


def report_progress(text: str, *, count: bool = False) -> None:
    """Sends the listener what is done from now on.

    count  the text counts steps: sent only EVERY_S seconds after the last message
    """
    global _last
    now = time.monotonic()
    if not _listeners or (count and now - _last < EVERY_S):
        return
    _last = now
    _listeners[-1](text)


@contextlib.contextmanager
def progress_sent_to(listener: Listener) -> Iterator[None]:
    """Sends progress messages to `listener` while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()
