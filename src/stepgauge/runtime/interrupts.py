"""Delays interrupts where they would leave something half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delays Ctrl-C, and a SIGTERM that Python handles, until the block ends.

    Thread.start and Process.start must run in such a block. They are Python code that holds locks and
    sends messages in several parts: an exception in between can leave a lock held, so that the thread
    waits for it forever, or a process with half of its arguments.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread only
        return
    arrived: list[int] = []
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(handler := signal.getsignal(number))
    }
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: arrived.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for sent in dict.fromkeys(arrived):
            signal.raise_signal(sent)
