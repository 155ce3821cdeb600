"""Calls functions in other processes: a fresh one, or the ranks of a process group.

This isolates crashes, exhausted memory and warm caches. Single processes fork within milliseconds
from a server (runtime.fork_server) that has not used any device.
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

from stepgauge.runtime.fork_server import describe_exit, start_process
from stepgauge.runtime.launch import RankError, Ranks
from stepgauge.runtime.parent import end_with_parent
from stepgauge.runtime.progress import Listener, progress_sent_to
from stepgauge.runtime.propagate_errors import propagate_errors
from stepgauge.runtime.world import KEPT_GROUP, World, default_backend, joined_world

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Progress:
    """A progress message that a process sends before its answer."""

    text: str


def run_isolated(function: Function, *arguments: Any) -> Any:
    """Calls function(*arguments) in a fresh process. Both must be picklable. Raises RankError."""
    with Workers() as workers:
        return workers.call(function, *arguments)


class Workers:
    """Calls functions in other processes. A context manager that ends all processes at its exit.

    hear  called with the progress messages of the functions (runtime.progress)
    """

    def __init__(self, hear: Listener = lambda text: None) -> None:
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
        share: str = "",
    ) -> Any:
        """Returns function(*arguments) as computed in another process, or by rank 0 of `ranks`.

        ranks    number of processes in a process group, each with its own device; None: one process
                 without a group. Under torchrun this process is one of the ranks
        backend  of the process group; None: the device's default
        share    if not "", the processes are kept for the next call with the same share and settings

        Raises RankError if the function raises or a process dies, ValueError if torchrun has started
        another number of ranks.
        """
        backend = backend or default_backend(device)
        world = joined_world()
        if ranks is not None and world is not None:
            if world.size != ranks:
                raise ValueError(f"ranks is {ranks}; torchrun has started {world.size}")
            with progress_sent_to(self._hear):
                return _call_joined(world, lambda: function(*arguments), device, backend)
        processes = self._processes(share, ranks, device, backend)
        try:
            return processes.call(self._hear, function, *arguments)
        except BaseException:
            self.close(kill=True)
            raise
        finally:
            if not share:
                self.close()

    def _processes(self, share: str, ranks: int | None, device: str, backend: str) -> "_Processes":
        """Returns the kept processes if share and settings are the same, else new ones."""
        key = (share, ranks, device, backend)
        if self._kept is None or not share or self._kept[0] != key:
            self.close()
            new = _Process() if ranks is None else _Group(ranks, device, backend)
            self._kept = key, new
        return self._kept[1]

    def close(self, *, kill: bool = False) -> None:
        """Tells the kept processes to end, or kills them."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close(kill=kill)


class _Processes(Protocol):
    def call(self, hear: Listener, function: Function, *arguments: Any) -> Any: ...

    def close(self, *, kill: bool) -> None: ...


class _Process:
    """One process, connected by a pipe."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(other_end,), daemon=False)
        try:
            start_process(self._process)
        except BaseException:
            self._pipe.close()  # ends the process if it has started
            raise
        other_end.close()

    def call(self, hear: Listener, function: Function, *arguments: Any) -> Any:
        try:
            self._pipe.send((function, arguments))
            while isinstance(answer := self._receive(), Progress):
                hear(answer.text)
            succeeded, value = answer
        except (EOFError, ConnectionError):
            self._process.join()
            raise _death(self._process.exitcode or 0) from None
        if succeeded:
            return value
        raise RankError(**value)

    def _receive(self) -> Any:
        # Also wait for the process itself: its children may hold the pipe open after its death.
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


def _death(exit_code: int) -> RankError:
    if exit_code >= 0:
        return RankError(f"the measuring process {describe_exit(exit_code)}", rank=0)
    ended_by = signal.Signals(-exit_code)
    return RankError(
        f"the measuring process was ended by {ended_by.name}", rank=0, ended_by=ended_by
    )


def _serve(pipe: Connection) -> None:
    """Main function of a single process: answers calls until the parent closes the pipe."""
    # The terminal sends Ctrl-C to the whole process group; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    sys.stdout = sys.stderr  # a user's network may print; standard output is for tables
    with contextlib.suppress(EOFError), progress_sent_to(lambda text: pipe.send(Progress(text))):
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
    """Ranks that wait for calls. Rank 0 receives them through a pipe and broadcasts them."""

    def __init__(self, ranks: int, device: str, backend: str):
        self._pipe, other_end = multiprocessing.get_context("forkserver").Pipe()
        self._ranks = Ranks(
            _serve_on_rank,
            other_end,
            ranks=ranks,
            device=device,
            backend=backend,
        )
        self._ranks.__enter__()

    def call(self, hear: Listener, function: Function, *arguments: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):  # `wait` raises the reason
            self._pipe.send((function, arguments))
        while isinstance(answer := self._receive(), Progress):
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


def _serve_on_rank(pipe: Connection) -> None:
    """Main function of a rank: all ranks call what rank 0 receives, until it receives None."""
    sys.stdout = sys.stderr
    is_first = dist.get_rank() == 0
    while True:
        call = [pipe.recv() if is_first else None]
        dist.broadcast_object_list(call)
        if call[0] is None:
            return
        function, arguments = call[0]
        if is_first:
            with progress_sent_to(lambda text: pipe.send(Progress(text))):
                value = function(*arguments)
            pipe.send(value)
        else:
            function(*arguments)


def _call_joined(world: World, action: Callable[[], Any], device: str, backend: str) -> Any:
    """Calls the action under torchrun. If it fails on a rank, all ranks raise and leave the group."""
    KEPT_GROUP.use(world, backend=backend, device=world.device(device))
    try:
        return propagate_errors(world, action)
    except RankError:
        KEPT_GROUP.close()
        raise
