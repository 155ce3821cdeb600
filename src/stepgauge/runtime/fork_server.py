"""The server that processes fork from: it imports once what each of them would take seconds to."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

_PRELOADED: list[str] = []


def preload(*modules: str) -> None:
    """Names modules that the server imports before it forks; only before it is started."""
    _PRELOADED.extend(modules)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)


def start_server() -> None:
    """Starts it where it does not run yet. Ctrl-C, which reaches the whole group, passes it and what
    it forks by: while it imports, it would end with a traceback.
    """
    with _interrupts_held():
        forkserver.ensure_running()


def stop_server() -> None:
    """Ends it, and with it whatever waits for a process that it was to fork; the next one that is
    asked for starts another.
    """
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None:  # None: it was never started
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C is delivered afterwards; processes that start meanwhile never have it."""
    # The server starts this one else, and it lets interrupts through in the end.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
