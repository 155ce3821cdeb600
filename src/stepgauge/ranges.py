"""Names for the parts of a step: a no-op until something that records them, a profiler say, is
there.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Recorder = Callable[[str], AbstractContextManager[object]]

_nothing = contextlib.nullcontext()
_recorder: Recorder | None = None


def ranged(name: str) -> AbstractContextManager[object]:
    """The context in which the part of that name runs."""
    return _nothing if _recorder is None else _recorder(name)


@contextlib.contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Every range that is entered inside goes to the recorder."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before
