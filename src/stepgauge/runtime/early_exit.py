"""Ranks that end with status 0 before their function has returned, by os._exit(0) or sys.exit().

torch's launcher waits for the value of such a rank for ever, and its peers wait in a collective. So
each rank is a file for as long as it has not returned, and the launcher looks after who is gone.
"""

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LOOK_EVERY_S = 0.2
# A rank that raised or died has as long to be found by the launcher, which knows why; ranks that
# fail because of it wait for longer (launch.CONSEQUENCE_S).
TOLD_WITHIN_S = 2.0


@contextlib.contextmanager
def running(folder: str, rank: int) -> Iterator[None]:
    """Around what a rank runs."""
    file = Path(folder, f"{rank}.{os.getpid()}")
    file.touch()
    yield
    file.unlink()  # not when it is left by an exception or an exit


def returned(folder: str, ranks: int) -> list[int]:
    """The ranks that have, of those which all have begun."""
    return sorted({*range(ranks)} - {_rank_and_pid(name)[0] for name in _names(folder)})


@contextlib.contextmanager
def watched(
    folder: str, left: Callable[[int], None], nobody_is_left: Callable[[], None]
) -> Iterator[None]:
    """Around the launcher. Tells the rank that has gone without having returned, and kills the
    others, which ends the launcher; tells if that does not, since nobody is left to be killed.
    """
    over = threading.Event()
    watch = functools.partial(_watch, folder, over, left, nobody_is_left)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(
    folder: str,
    over: threading.Event,
    left: Callable[[int], None],
    nobody_is_left: Callable[[], None],
) -> None:
    missing_since: dict[str, float] = {}
    while not over.wait(LOOK_EVERY_S):
        for name in _missing(folder):
            since = missing_since.setdefault(name, time.monotonic())
            if time.monotonic() - since > TOLD_WITHIN_S:
                left(_rank_and_pid(name)[0])
                _kill(folder)
                if not over.wait(TOLD_WITHIN_S):
                    nobody_is_left()
                return


def _missing(folder: str) -> list[str]:
    return [name for name in sorted(_names(folder)) if not _is_alive(_rank_and_pid(name)[1])]


def _kill(folder: str) -> None:
    for name in _names(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(_rank_and_pid(name)[1], signal.SIGKILL)


def _names(folder: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):  # the interpreter ends, and has removed it
        return [file.name for file in Path(folder).iterdir()]
    return []


def _rank_and_pid(name: str) -> tuple[int, int]:
    rank, _, pid = name.partition(".")
    return int(rank), int(pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
