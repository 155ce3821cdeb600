"""The fork server: it imports slow modules once, so that processes forked from it start quickly."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess

from stepgauge.runtime.interrupts import interrupts_delayed

_PRELOADED: list[str] = []


def preload(*modules: str) -> None:
    """Adds modules that the server imports when it starts. Must be called before that."""
    _PRELOADED.extend(modules)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)


def describe_exit(status: int) -> str:
    """Returns in words how a process ended whose exit status is 0 or more."""
    if status != 255:
        return f"exited with {status}"
    # multiprocessing reports 255 for a process whose fork server has died.
    return (
        "exited with 255, which is also reported if the process that started it (Python's fork "
        "server) was killed"
    )


def start_server() -> None:
    """Starts the server if it is not running.

    Ctrl-C, which the terminal sends to the whole process group, does not reach the server or its
    children; otherwise it would end with a traceback while it imports.
    """
    with _interrupts_blocked():
        forkserver.ensure_running()


def start_process(process: ForkServerProcess) -> None:
    """Starts the process, and the server if it is not running."""
    start_server()
    with interrupts_delayed():
        process.start()


def stop_server() -> None:
    """Kills the server; requests that wait for it to fork end. The next fork starts a new server."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None:  # None: it was never started
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Delays Ctrl-C until the block ends; processes started in the block never receive it."""
    # Start the resource tracker first: otherwise the server starts it, and the tracker unblocks
    # interrupts.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
