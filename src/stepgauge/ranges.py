"""Named ranges that mark the parts of a step; a no-op unless a profiler records them."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Recorder = Callable[[str], AbstractContextManager[object]]

_nothing = contextlib.nullcontext()
_recorder: Recorder | None = None


def ranged(name: str) -> AbstractContextManager[object]:
    """Returns a context manager that marks its body as the part called `name`."""
    return _nothing if _recorder is None else _recorder(name)


@contextlib.contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """While the context is open, every `ranged` block also enters `recorder(name)`."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before
