"""Runs a function on many ranks: started here through torch's elastic launcher, or already there
through torchrun.
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stepgauge.runtime.early_exit import returned, running, watched
from stepgauge.runtime.fork_server import preload, start_server, stop_server
from stepgauge.runtime.host import threads_of_a_rank
from stepgauge.runtime.parent import end_with_parent
from stepgauge.runtime.world import (
    KEPT_GROUP,
    TIMEOUT_S,
    World,
    check_interfaces,
    default_backend,
    gathered_objects,
    joined_world,
    process_group,
    this_world,
)

# A rank that fails because another has died waits this long, so that the launcher sees the other's
# end first.
CONSEQUENCE_S = 3.0
STARTED_S = 0.5  # that ranks take which the server can fork at once
# multiprocessing hands each process at most 256 descriptors, torch's launcher two a rank.
MOST_STARTED = 100
_LOOPBACK = ("lo", "lo0")


preload(__name__, "torch.distributed.fsdp", "torch.distributed.nn.functional")


class RankError(Exception):
    """A rank, or a single process, raised or died.

    type      name of the exception; empty if it died
    reason    the exception's message; `trace` its traceback
    ended_by  the signal that ended it; None if it raised or exited
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        type: str = "",
        reason: str = "",
        trace: str = "",
        ended_by: signal.Signals | None = None,
    ):
        super().__init__(message)
        self.rank, self.type, self.reason, self.trace = rank, type, reason, trace
        self.ended_by = ended_by


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    device: str = "cpu",
    backend: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """function(*arguments) on every rank, in a process group; the values that the ranks returned,
    in their order.

    Function, arguments and values must be picklable. In a process of torchrun, that process is one
    of the ranks and nothing is started. device "cuda" gives each rank the GPU of its local rank. A
    collective that takes longer than `timeout_s` fails. Raises RankError for the first rank that
    raised or died; the others have ended by then.
    """
    backend = backend or default_backend(device)
    world = joined_world()
    if world is not None:
        if world.size != ranks:
            raise ValueError(f"ranks is {ranks}; torchrun has started {world.size}")
        try:
            return run_joined(
                world, function, *arguments, device=device, backend=backend, timeout_s=timeout_s
            )
        finally:
            KEPT_GROUP.close()  # while all ranks are there, rather than when the interpreter ends
    with Ranks(
        function, *arguments, ranks=ranks, device=device, backend=backend, timeout_s=timeout_s
    ) as started:
        return started.wait()


def run_joined(
    world: World,
    function: Callable[..., Any],
    *arguments: Any,
    device: str,
    backend: str,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """As `launch`, in a process that is a rank already. Raises what the function raises here."""
    KEPT_GROUP.use(world, backend=backend, device=world.device(device), timeout_s=timeout_s)
    return gathered_objects(function(*arguments))


class Ranks:
    """Ranks that run a function on this machine. A context manager: no rank is left when it ends.

    Raises ValueError for a network interface that is not there, and for more ranks than one process
    can start.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        device: str = "cpu",
        backend: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ):
        if ranks > MOST_STARTED:
            raise ValueError(
                f"ranks is {ranks}; {MOST_STARTED} at most are started here, more by torchrun"
            )
        check_interfaces()
        settings = {
            "device": device,
            "backend": backend or default_backend(device),
            "timeout_s": timeout_s,
        }
        self._call = (function, arguments, settings)
        self._ranks = ranks
        self._values: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._before: set[BaseProcess] = set()
        # The launcher's loop has a thread of its own, so that Ctrl-C is this one's.
        self._ended = threading.Event()
        self._launcher = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._before = set(multiprocessing.active_children())
        start_server()  # here: the launcher's thread cannot keep Ctrl-C from it
        self._launcher.start()
        return self

    def __exit__(self, type: object, *_: object) -> None:
        if type is not None:
            self._end()
        self._ended.wait()

    def _end(self) -> None:
        """Ends the ranks; more than once, for some may not have been started yet."""
        late = time.monotonic() + STARTED_S
        while not self._ended.wait(0.1):
            for process in set(multiprocessing.active_children()) - self._before:
                process.kill()
            if time.monotonic() > late:  # the launcher waits for a server that still imports
                stop_server()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def wait(self) -> list[Any]:
        """The ranks' values, when all have returned. Raises RankError."""
        # Not the thread's join: interrupted by Ctrl-C, it takes the thread for ended.
        while not self._ended.wait(0.2):
            pass
        if self._error is not None:
            raise self._error
        return [self._values[rank] for rank in range(self._ranks)]

    def _run(self) -> None:
        try:
            with (
                _quiet_launcher(),
                tempfile.TemporaryDirectory() as logs,
                tempfile.TemporaryDirectory() as folder,
            ):
                launcher = elastic_launch(_config(self._ranks, logs), _rank)
                try:
                    with watched(folder, self._left, self._ended.set):
                        self._values = launcher(folder, *self._call)
                except ChildFailedError as error:
                    rank, failure = error.get_first_failure()
                    if not isinstance(self._error, RankError) or self._error.rank == rank:
                        self._error = _rank_error(rank, failure, self._ranks)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _left(self, rank: int) -> None:
        words = f"rank {rank} of {self._ranks} ended with status 0 before it returned"
        self._error = RankError(words, rank=rank)


def _config(ranks: int, folder: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"stepgauge-{os.getpid()}-{time.monotonic_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a port that is free
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """What went wrong is told once, by RankError."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _rank(
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    settings: dict[str, Any],
) -> Any:
    """A rank's whole life."""
    gc.freeze()  # else each collection looks through all that torch has loaded
    # Ctrl-C reaches the whole group; the parent ends us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    world = this_world()
    torch.set_num_threads(threads_of_a_rank(world.local_size))
    interfaces = {name for _, name in socket.if_nameindex()}
    if loopback := interfaces.intersection(_LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    device, backend, timeout_s = settings["device"], settings["backend"], settings["timeout_s"]
    try:
        with (
            running(folder, world.rank),
            process_group(world, backend=backend, device=world.device(device), timeout_s=timeout_s),
        ):
            return function(*arguments)
    except SystemExit as error:  # of a user's code; the launcher would take 0 for success
        raise RuntimeError(f"SystemExit: {error.code}") from error
    except Exception as error:
        if _is_consequence(error):
            time.sleep(CONSEQUENCE_S)
            for rank in returned(folder, world.size):
                raise RuntimeError(
                    f"rank {rank} has returned already, and this one waited for it: do all ranks "
                    f"have equally many batches? ({error})"
                ) from error
        raise


def _is_consequence(error: BaseException | None) -> bool:
    """Whether a rank fails because its peers do not answer, or raises this while it handles that:
    a checkpoint that cannot be written, for one.
    """
    if error is None:
        return False
    words = ("connection", "timed out", "timeout", "socket", "peer")
    is_unanswered = isinstance(error, dist.DistError | RuntimeError | EOFError) and any(
        w in str(error).lower() for w in words
    )
    return is_unanswered or _is_consequence(error.__context__)


def _rank_error(rank: int, failure: ProcessFailure, ranks: int) -> RankError:
    who = f"rank {rank} of {ranks}"
    told = failure.error_file_data.get("message", "")
    if not isinstance(told, dict):
        ended = (
            f"was ended by {failure.signal_name()}"
            if failure.exitcode < 0
            else f"exited with {failure.exitcode}"
        )
        return RankError(f"{who} {ended}", rank=rank)
    message = str(told.get("message", "")).strip()
    type, _, reason = message.partition(": ")
    first_line = (reason or "no message").partition("\n")[0]
    trace = str(told.get("extraInfo", {}).get("py_callstack", ""))
    return RankError(
        f"{who}: {type}: {first_line}", rank=rank, type=type, reason=first_line, trace=trace
    )
