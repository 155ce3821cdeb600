"""Python's garbage collector, paused while a trace is read and analysed."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """The collector looks for cycles among all that lives, again and again as events come in; a
    trace of a million events makes none, and takes a fifth longer with it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
