"""Runs a function in a process of its own, so that a crash, an OOM or a warm cache stays there.

Processes fork from a server that has imported what `preload` named and touched no device, in
milliseconds.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from stepgauge.runtime.parent import end_with_parent


class ProcessDiedError(Exception):
    """The process ended without an answer; `signal` is what ended it, or None if it exited by
    itself.
    """

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
    """Names the modules that the server imports before it forks; has an effect before the first
    run_isolated only.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


def run_isolated(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in a fresh process. Both must be picklable. Raises ProcessDiedError or
    RemoteError.
    """
    with contextlib.closing(Worker()) as worker:
        return worker.call(function, *arguments)


class Worker:
    """A fresh process that runs one function after another, so that what is costly to set up is set
    up once.

    After ProcessDiedError it takes no more calls.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=False)
        with _interrupts_held():
            self._process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """As run_isolated, in this process."""
        try:
            self._pipe.send((function, arguments))
            # The process itself is waited for too: what it started may hold the pipe open after it
            # died.
            multiprocessing.connection.wait([self._pipe, self._process.sentinel])
            if not self._pipe.poll():
                raise EOFError
            succeeded, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise ProcessDiedError(self._process.exitcode or 0) from None
        if succeeded:
            return value
        raise RemoteError(*value)

    def close(self) -> None:
        self._pipe.close()
        _end(self._process)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Gives the process a moment to leave by itself, and no more."""
    process.join(timeout=0 if sys.exc_info()[0] else 10)
    if process.is_alive():
        process.kill()
        process.join()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C while the server starts would kill it half-way, with a traceback; it is delivered
    afterwards.
    """
    # which the server starts else, and which lets interrupts through in the end
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    """Answers calls until the parent closes its end."""
    # Ctrl-C reaches the whole group; the parent ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((True, function(*arguments)))
            except BaseException as error:
                pipe.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))
