"""What a long measurement does now, told to whoever shows it; to nobody in a process that nobody
listens to.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

Hear = Callable[[str], None]
EVERY_S = 0.5  # between two counts that are told
_hearers: list[Hear] = []
_last = 0.0


def tell(text: str, *, count: bool = False) -> None:
    """Says what is done from now on. Of what counts steps, two a second are told at most."""
    global _last
    now = time.monotonic()
    if not _hearers or (count and now - _last < EVERY_S):
        return
    _last = now
    _hearers[-1](text)


@contextlib.contextmanager
def heard_by(hear: Hear) -> Iterator[None]:
    """While the block runs, `hear` is told."""
    _hearers.append(hear)
    try:
        yield
    finally:
        _hearers.pop()
