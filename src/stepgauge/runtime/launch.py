"""Runs a function on many ranks, started by torch's elastic launcher or already by torchrun."""

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

from stepgauge.runtime.early_exit import (
    POLL_S,
    failed_ranks,
    file_while_running,
    returned_ranks,
    watch_for_early_exit,
)
from stepgauge.runtime.fork_server import describe_exit, preload, start_server, stop_server
from stepgauge.runtime.host import threads_per_rank
from stepgauge.runtime.interrupts import interrupts_delayed
from stepgauge.runtime.parent import end_with_parent
from stepgauge.runtime.world import (
    KEPT_GROUP,
    TIMEOUT_S,
    check_interfaces,
    default_backend,
    gathered_objects,
    joined_world,
    process_group,
    this_world,
)

# A rank that fails because another one failed waits, so that the launcher notices that one first and
# reports it. It waits this long in any case, and up to LATE_EXIT_S while that one still exits, which
# takes seconds on a busy machine.
CONSEQUENCE_S = 3.0
LATE_EXIT_S = 60.0
STARTED_S = 0.5  # time to start ranks if the fork server is ready
NOTICED_S = 30.0  # time in which torch's launcher notices that all ranks were killed
# multiprocessing passes at most 256 file descriptors to a process; torch's launcher needs two per rank.
MOST_STARTED = 100
_LOOPBACK = ("lo", "lo0")

preload(__name__, "torch.distributed.fsdp", "torch.distributed.nn.functional")


class RankError(Exception):
    """A rank, or a single process, raised an exception or died.

    type      name of the exception; "" if the process died
    reason    message of the exception
    trace     its traceback
    ended_by  the signal that ended the process; None if it raised or exited
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
    """Runs function(*arguments) on every rank of a process group and returns the values by rank.

    Function, arguments and values must be picklable. Under torchrun nothing is started: this process
    is one of the ranks. With device "cuda", each rank uses the GPU of its local rank. Collectives
    that take longer than `timeout_s` fail. Raises RankError for the first rank that raised or died,
    after the other ranks have ended; under torchrun, what the function raised on this rank.
    """
    backend = backend or default_backend(device)
    world = joined_world()
    if world is not None:
        if world.size != ranks:
            raise ValueError(f"ranks is {ranks}; torchrun has started {world.size}")
        try:
            KEPT_GROUP.use(world, backend=backend, device=world.device(device), timeout_s=timeout_s)
            return gathered_objects(function(*arguments))
        finally:
            KEPT_GROUP.close()  # now, while all ranks still run, instead of at interpreter exit
    with Ranks(
        function, *arguments, ranks=ranks, device=device, backend=backend, timeout_s=timeout_s
    ) as started:
        return started.wait()


class _End:
    """An event for one waiting thread that Ctrl-C cannot break.

    threading.Event.wait is Python code that holds a lock. A KeyboardInterrupt raised between acquiring
    and releasing it can leave it held, and then every later `wait` and `set` blocks forever.
    Lock.acquire is interrupted only while it waits.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._before = threading.Lock()  # held until the event is set
        self._before.acquire()

    def set(self) -> None:
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # released by an earlier call
            self._before.release()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Waits for the event, at most `timeout_s`. Returns is_set()."""
        if not self._is_set:
            self._before.acquire(timeout=timeout_s)
        return self._is_set

    def join(self) -> None:
        """Waits for the event without a limit."""
        # In pieces, because a Ctrl-C right before Lock.acquire blocks is noticed only after it.
        while not self.wait(POLL_S):
            pass


class Ranks:
    """A context manager that runs a function on ranks of this machine, and ends them at its exit.

    Raises ValueError for an unknown network interface, and for more ranks than one process can
    start.
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
                f"ranks is {ranks}; at most {MOST_STARTED} can be started here: use torchrun for more"
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
        self._earlier_children: set[BaseProcess] = set()
        # The launcher runs in another thread, so that this one can handle Ctrl-C.
        self._is_killed = False
        self._ended = _End()
        self._launcher = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._earlier_children = set(multiprocessing.active_children())
        start_server()  # here, because the launcher's thread cannot shield it from Ctrl-C
        try:
            with interrupts_delayed():
                self._launcher.start()
        except BaseException:  # Ctrl-C: without __enter__ there is no __exit__
            if self._kill():
                self._ended.join()
            raise
        return self

    def __exit__(self, type: object, *_: object) -> None:
        if type is not None:
            self._kill()
        self._ended.join()

    def _kill(self) -> bool:
        """Starts to kill the ranks, in a thread, because a second Ctrl-C interrupts this one. The
        interpreter waits for it. Returns False if the launcher does not run.
        """
        self._is_killed = True
        if self._launcher.ident is None:  # if it starts after all, it starts no ranks
            return False
        with interrupts_delayed():
            threading.Thread(target=self._kill_until_ended).start()
        return True

    def _kill_until_ended(self) -> None:
        """Kills the ranks, repeatedly, because some may not have been started yet. Gives up after
        NOTICED_S: ranks, and the launcher's thread, also end with this process.
        """
        begin = time.monotonic()
        try:
            while not self._ended.wait(0.1) and (elapsed := time.monotonic() - begin) < NOTICED_S:
                for process in set(multiprocessing.active_children()) - self._earlier_children:
                    process.kill()
                if elapsed > STARTED_S:  # the launcher waits for a server that still imports
                    stop_server()
        finally:
            self._ended.set()

    @property
    def running(self) -> bool:
        """True until all ranks have ended."""
        return not self._ended.is_set()

    def wait(self) -> list[Any]:
        """Waits for the ranks and returns their values by rank. Raises RankError."""
        # Thread.join, interrupted by Ctrl-C, would mark the thread as ended.
        self._ended.join()
        if self._error is not None:
            raise self._error
        return [self._values[rank] for rank in range(self._ranks)]

    def _run(self) -> None:
        try:
            if self._is_killed:
                return
            with (
                _quiet_launcher(),
                tempfile.TemporaryDirectory() as logs,
                tempfile.TemporaryDirectory() as folder,
            ):
                launcher = elastic_launch(_config(self._ranks, logs), _rank)
                try:
                    with watch_for_early_exit(folder, self._exited_early, self._ended.set):
                        self._values = launcher(folder, *self._call)
                except ChildFailedError as error:
                    rank, failure = error.get_first_failure()
                    if not isinstance(self._error, RankError) or self._error.rank == rank:
                        self._error = _rank_error(rank, failure, self._ranks)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _exited_early(self, rank: int) -> None:
        message = f"rank {rank} of {self._ranks} ended with status 0 before it returned"
        self._error = RankError(message, rank=rank)


def _config(ranks: int, folder: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"stepgauge-{os.getpid()}-{time.monotonic_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # any free port
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silences the loggers of torch's launcher, because RankError reports what went wrong."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _rank(
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    settings: dict[str, Any],
) -> Any:
    """Main function of a rank."""
    gc.freeze()  # otherwise each garbage collection scans everything that torch has loaded
    # The terminal sends Ctrl-C to the whole process group; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    world = this_world()
    torch.set_num_threads(threads_per_rank(world.local_size))
    interfaces = {name for _, name in socket.if_nameindex()}
    if loopback := interfaces.intersection(_LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    device, backend, timeout_s = settings["device"], settings["backend"], settings["timeout_s"]
    try:
        with (
            file_while_running(folder, world.rank) as file,
            process_group(world, backend=backend, device=world.device(device), timeout_s=timeout_s),
        ):
            try:
                return function(*arguments)
            except BaseException as error:
                if not _is_consequence(error):
                    file.write_text("raised")  # before the peers notice the end of the group
                raise
    except SystemExit as error:  # from a user's code; the launcher would take status 0 for success
        raise RuntimeError(f"SystemExit: {error.code}") from error
    except Exception as error:
        if _is_consequence(error):
            _wait_for_the_launcher(folder, world.rank)
            for rank in returned_ranks(folder, world.size):
                raise RuntimeError(
                    f"rank {rank} has already returned while this rank waited for it: do all ranks "
                    f"have the same number of batches? ({error})"
                ) from error
        raise


def _wait_for_the_launcher(folder: str, rank: int) -> None:
    """Waits until the launcher has noticed the rank that failed first; it then ends this one too.

    Returns if no other rank has failed.
    """
    deadline = time.monotonic() + LATE_EXIT_S
    time.sleep(CONSEQUENCE_S)
    while failed_ranks(folder) - {rank} and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _is_consequence(error: BaseException | None) -> bool:
    """Returns True if a peer that does not answer caused the error.

    The error may also have been raised while that was handled: a checkpoint that cannot be written,
    for example.
    """
    if error is None:
        return False
    words = ("connection", "timed out", "timeout", "socket", "peer")
    is_network_error = isinstance(error, dist.DistError | RuntimeError | EOFError) and any(
        word in str(error).lower() for word in words
    )
    return is_network_error or _is_consequence(error.__context__)


def _rank_error(rank: int, failure: ProcessFailure, ranks: int) -> RankError:
    name = f"rank {rank} of {ranks}"
    details = failure.error_file_data.get("message", "")
    if not isinstance(details, dict):  # the rank died without an exception
        end = (
            f"was ended by {failure.signal_name()}"
            if failure.exitcode < 0
            else describe_exit(failure.exitcode)
        )
        return RankError(f"{name} {end}", rank=rank)
    message = str(details.get("message", "")).strip()
    type, _, reason = message.partition(": ")
    first_line = (reason or "no message").partition("\n")[0]
    trace = str(details.get("extraInfo", {}).get("py_callstack", ""))
    return RankError(
        f"{name}: {type}: {first_line}", rank=rank, type=type, reason=first_line, trace=trace
    )
