"""Runs a function in a process of its own, so that a crash, an OOM or a warm cache stays there.

Processes fork from a server that has imported the function's module but touched no device, in milliseconds.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any


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


def run_isolated(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in a fresh process. Both must be picklable. Raises ProcessDiedError or RemoteError."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments), daemon=False)
    process.start()
    sender.close()
    try:
        succeeded, value = receiver.recv()
    except EOFError:
        process.join()
        raise ProcessDiedError(process.exitcode or 0) from None
    except BaseException:
        process.kill()
        process.join()
        raise
    process.join()
    if succeeded:
        return value
    raise RemoteError(*value)


def _answer(
    sender: multiprocessing.connection.Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        sender.send((True, function(*arguments)))
    except BaseException as error:
        sender.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))


def _end_with_parent() -> None:
    """A parent that was killed must not leave a process behind that holds the device."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
