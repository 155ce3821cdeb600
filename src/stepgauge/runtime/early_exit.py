"""Detects ranks that exit with status 0, by os._exit(0) say, before their function has returned.

torch's launcher would wait for the value of such a rank forever, while its peers wait in a
collective. So each rank keeps a file until it has returned, and a thread of the launcher checks
whether the process of each file is still alive. A rank that raises writes this to its file.
"""

import collections
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_S = 0.2
# torch's launcher notices a rank that raised or died within this time, and knows the reason. Ranks
# that fail in consequence wait longer (launch._wait_for_the_launcher).
GRACE_S = 2.0


@contextlib.contextmanager
def file_while_running(folder: str, rank: int) -> Iterator[Path]:
    """Keeps the rank's file while the block runs; it stays if the block raises or exits."""
    file = Path(folder, f"{rank}.{os.getpid()}")
    file.touch()
    yield file
    file.unlink()


def returned_ranks(folder: str, ranks: int) -> list[int]:
    """Returns the ranks whose function has returned, provided that all have started."""
    return sorted({*range(ranks)} - _unreturned_pids(folder).keys())


def failed_ranks(folder: str) -> set[int]:
    """Returns the ranks that wrote to their file that they raised, or that died."""
    failed = set()
    for rank, pid in _unreturned_pids(folder).items():
        with contextlib.suppress(FileNotFoundError):  # it has returned meanwhile
            if Path(folder, f"{rank}.{pid}").read_text() or not _is_alive(pid):
                failed.add(rank)
    return failed


@contextlib.contextmanager
def watch_for_early_exit(
    folder: str, on_exit: Callable[[int], None], on_stuck: Callable[[], None]
) -> Iterator[None]:
    """Watches the ranks while the launcher runs in the block.

    If a rank exits early, calls on_exit(rank) and kills the other ranks, which makes the launcher
    return. If it still does not, because no other rank is left, calls on_stuck().
    """
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(folder, done, on_exit, on_stuck), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(
    folder: str,
    done: threading.Event,
    on_exit: Callable[[int], None],
    on_stuck: Callable[[], None],
) -> None:
    polls_when_dead: collections.Counter[int] = collections.Counter()
    while not done.wait(POLL_S):
        pids = _unreturned_pids(folder)
        for rank, pid in sorted(pids.items()):
            if _is_alive(pid):
                continue
            # Counted, not timed: while a busy machine delays this process, the launcher waits too.
            polls_when_dead[rank] += 1
            if polls_when_dead[rank] > GRACE_S / POLL_S:
                on_exit(rank)
                for other in _unreturned_pids(folder).values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
                if not done.wait(GRACE_S):
                    on_stuck()
                return


def _unreturned_pids(folder: str) -> dict[int, int]:
    """Returns rank -> process id, from the files of ranks that have not returned."""
    with contextlib.suppress(FileNotFoundError):  # removed because the interpreter is exiting
        names = [file.name.split(".") for file in Path(folder).iterdir()]
        return {int(rank): int(pid) for rank, pid in names}
    return {}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
