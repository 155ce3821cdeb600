"""Runs a function in a process of its own, so that a crash, an OOM or a warm cache stays there.

Processes fork from a server that has imported what `preload` named and touched no device, in milliseconds.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from stepgauge.parallel.parent import end_with_parent


class ProcessDiedError(Exception):
    """The process ended without an answer; `signal` is what ended it, or None if it exited by itself."""

    def __init__(self, exit_code: int):
        self.signal = signal.Signals(-exit_code) if exit_code < 0 else None
        ended = f"was ended by {self.signal.name}" if self.signal else f"exited with {exit_code}"
        super().__init__(f"the measuring process {ended}")


class RemoteError(Exception):
    """The function raised; `trace` is the traceback there."""

    def __init__(self, message: str, trace: str):
        super().__init__(message)
        self.trace = trace


def preload(*modules: str) -> None:
    """Names the modules that the server imports before it forks; has an effect before the first run_isolated only."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


def run_isolated(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in a fresh process. Both must be picklable. Raises ProcessDiedError or RemoteError."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments), daemon=False)
    with _interrupts_held():
        process.start()
    sender.close()
    try:
        # The process itself is waited for too: what it started may hold the pipe open after it died.
        multiprocessing.connection.wait([receiver, process.sentinel])
        if not receiver.poll():
            raise EOFError
        succeeded, value = receiver.recv()
    except EOFError:
        process.join()
        raise ProcessDiedError(process.exitcode or 0) from None
    finally:
        _end(process)
    if succeeded:
        return value
    raise RemoteError(*value)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Gives the process a moment to leave by itself, and no more."""
    process.join(timeout=0 if sys.exc_info()[0] else 10)
    if process.is_alive():
        process.kill()
        process.join()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C while the server starts would kill it half-way, with a traceback; it is delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answer(
    sender: multiprocessing.connection.Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    # Ctrl-C reaches the whole group; the parent ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    try:
        sender.send((True, function(*arguments)))
    except BaseException as error:
        sender.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))
