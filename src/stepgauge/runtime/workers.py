"""Functions called in other processes: in a fresh one, or on the ranks of a process group.

A crash, an exhausted memory or a warm cache stays in the process that had it. Single processes fork
in milliseconds from a server (runtime.fork_server) that touched no device.
"""

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

import torch.distributed as dist

from stepgauge.runtime.fork_server import start_server
from stepgauge.runtime.launch import RankError, Ranks
from stepgauge.runtime.parent import end_with_parent
from stepgauge.runtime.progress import Hear, heard_by
from stepgauge.runtime.propagate_errors import propagate_errors
from stepgauge.runtime.world import KEPT_GROUP, TIMEOUT_S, World, default_backend, joined_world

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Told:
    """What a process says that it does, on its way to an answer."""

    text: str


def run_isolated(function: Function, *arguments: Any) -> Any:
    """function(*arguments) in a fresh process. Both must be picklable. Raises RankError."""
    with Workers() as workers:
        return workers.call(function, *arguments)


class Workers:
    """Calls functions in other processes, and keeps the processes for the next call where both
    calls name the same `share`. A context manager: no process is left when it ends.

    hear  is told what the function says of its progress (runtime.progress)
    """

    def __init__(self, hear: Hear = lambda text: None) -> None:
        self._hear = hear
        self._kept: tuple[tuple[Any, ...], _Processes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, type: object, *_: object) -> None:
        self.close(kill=type is not None)

    def call(
        self,
        function: Function,
        *arguments: Any,
        ranks: int | None = None,
        device: str = "cpu",
        backend: str | None = None,
        timeout_s: float = TIMEOUT_S,
        share: str = "",
    ) -> Any:
        """The value of function(*arguments) in a process, or rank 0's on `ranks` ranks.

        ranks      processes that join a process group, each with a device of its own; None: a
                   process without a group. In a process of torchrun the ranks are there already,
                   and this process is one of them
        backend    of the process group; None: the device's usual one
        timeout_s  of a collective: a rank that hangs longer ends the call
        share      processes are kept for the next call of the same name and settings

        Raises RankError where the function raised or a process died; ValueError where torchrun has
        started another number of ranks.
        """
        backend = backend or default_backend(device)
        world = joined_world()
        if ranks is not None and world is not None:
            if world.size != ranks:
                raise ValueError(f"ranks is {ranks}; torchrun has started {world.size}")
            with heard_by(self._hear):
                return _call_joined(world, lambda: function(*arguments), device, backend, timeout_s)
        processes = self._processes(share, ranks, device, backend, timeout_s)
        try:
            return processes.call(self._hear, function, *arguments)
        except BaseException:
            self.close(kill=True)
            raise
        finally:
            if not share:
                self.close()

    def _processes(
        self, share: str, ranks: int | None, device: str, backend: str, timeout_s: float
    ) -> "_Processes":
        """Those that are kept, where they are such as are asked for, or new ones."""
        key = (share, ranks, device, backend, timeout_s)
        if self._kept is None or not share or self._kept[0] != key:
            self.close()
            started = _Process() if ranks is None else _Group(ranks, device, backend, timeout_s)
            self._kept = key, started
        return self._kept[1]

    def close(self, *, kill: bool = False) -> None:
        """Lets the processes that are kept end by themselves, or ends them."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close(kill=kill)


class _Processes(Protocol):
    def call(self, hear: Hear, function: Function, *arguments: Any) -> Any: ...

    def close(self, *, kill: bool) -> None: ...


class _Process:
    """One process, at the other end of a pipe."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs,), daemon=False)
        start_server()
        self._process.start()
        theirs.close()

    def call(self, hear: Hear, function: Function, *arguments: Any) -> Any:
        try:
            self._pipe.send((function, arguments))
            while isinstance(answer := self._receive(), Told):
                hear(answer.text)
            succeeded, value = answer
        except (EOFError, ConnectionError):
            self._process.join()
            raise _died(self._process.exitcode or 0) from None
        if succeeded:
            return value
        raise RankError(**value)

    def _receive(self) -> Any:
        # The process itself is waited for too: what it started may hold the pipe open after it died.
        multiprocessing.connection.wait([self._pipe, self._process.sentinel])
        if not self._pipe.poll():
            raise EOFError
        return self._pipe.recv()

    def close(self, *, kill: bool) -> None:
        self._pipe.close()
        self._process.join(timeout=0 if kill or sys.exc_info()[0] else 10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _died(exit_code: int) -> RankError:
    if exit_code >= 0:
        return RankError(f"the measuring process exited with {exit_code}", rank=0)
    ended_by = signal.Signals(-exit_code)
    return RankError(
        f"the measuring process was ended by {ended_by.name}", rank=0, ended_by=ended_by
    )


def _answer(pipe: Connection) -> None:
    """The life of a single process: answers calls until the parent closes its end."""
    # Ctrl-C reaches the whole group; the parent ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    sys.stdout = sys.stderr  # a user's network may print; standard output has the tables
    with contextlib.suppress(EOFError), heard_by(lambda text: pipe.send(Told(text))):
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((True, function(*arguments)))
            except BaseException as error:
                type_, reason = type(error).__name__, str(error)
                failure = {"rank": 0, "type": type_, "reason": reason}
                failure |= {"message": f"{type_}: {reason}", "trace": traceback.format_exc()}
                pipe.send((False, failure))


class _Group:
    """Ranks that wait for calls: rank 0 holds the other end of a pipe and tells its peers."""

    def __init__(self, ranks: int, device: str, backend: str, timeout_s: float):
        self._pipe, other = multiprocessing.get_context("forkserver").Pipe()
        self._ranks = Ranks(
            _answer_together,
            other,
            ranks=ranks,
            device=device,
            backend=backend,
            timeout_s=timeout_s,
        )
        self._ranks.__enter__()

    def call(self, hear: Hear, function: Function, *arguments: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):  # `wait` says why it is broken
            self._pipe.send((function, arguments))
        while isinstance(answer := self._receive(), Told):
            hear(answer.text)
        return answer

    def _receive(self) -> Any:
        while not self._pipe.poll(0.1):
            if not self._ranks.running:
                self._ranks.wait()
                raise RankError("the ranks ended without an answer", rank=0)
        return self._pipe.recv()

    def close(self, *, kill: bool) -> None:
        if not kill:
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send(None)
        self._ranks.__exit__(KeyboardInterrupt if kill else None)
        self._pipe.close()


def _answer_together(pipe: Connection) -> None:
    """The life of a rank: what rank 0 is told, all call, until it is told to end."""
    sys.stdout = sys.stderr
    is_first = dist.get_rank() == 0
    while True:
        told = [pipe.recv() if is_first else None]
        dist.broadcast_object_list(told)
        if told[0] is None:
            return
        function, arguments = told[0]
        if is_first:
            with heard_by(lambda text: pipe.send(Told(text))):
                value = function(*arguments)
            pipe.send(value)
        else:
            function(*arguments)


def _call_joined(
    world: World, action: Callable[[], Any], device: str, backend: str, timeout_s: float
) -> Any:
    """In a process of torchrun: one rank's failure is all ranks', which go on in a new group."""
    KEPT_GROUP.use(world, backend=backend, device=world.device(device), timeout_s=timeout_s)
    try:
        return propagate_errors(world, action, timeout_s=timeout_s)
    except RankError:
        KEPT_GROUP.close()
        raise
