"""Python's garbage collector, paused where it would be timed or takes long."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """The collector looks for cycles among all that lives: within a timed step it is a step that
    takes longer, and a trace of a million events, which makes none, takes a fifth longer with it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
