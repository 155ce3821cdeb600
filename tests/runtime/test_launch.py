"""Ranks start, return their values in order, and end in bounded time whatever happens to one."""

import itertools
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.processes import alive, wait_for

from stepgauge.runtime import launch as launch_module
from stepgauge.runtime.early_exit import _watch
from stepgauge.runtime.interrupts import interrupts_delayed
from stepgauge.runtime.launch import RankError, Ranks, _End, _is_consequence, launch
from stepgauge.runtime.world import TIMEOUT_S, check_interfaces, joined_world


def total(addend):
    tensor = torch.full((3,), float(dist.get_rank() + addend))
    dist.all_reduce(tensor)
    return dist.get_rank(), joined_world().size, tensor[0].item(), os.getpid()


@pytest.mark.parametrize("ranks", [1, 3])
def test_values_are_in_the_order_of_ranks(ranks):
    values = launch(total, 1, ranks=ranks)
    expected = sum(range(1, ranks + 1))
    assert [value[:3] for value in values] == [(rank, ranks, expected) for rank in range(ranks)]
    assert len({value[3] for value in values} | {os.getpid()}) == ranks + 1


def fail(how, failed_at=None):
    """Makes rank 1 fail while the others wait for it in a collective."""
    if dist.get_rank() == 1:
        if failed_at is not None:
            failed_at.write_text(str(time.time()))
        match how:
            case "raise":
                raise ValueError("that is wrong\nat length")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise and exit slowly":
                multiprocessing.util.Finalize(None, time.sleep, args=(6,), exitpriority=100)
                raise ValueError("that is wrong")
            case "exit":
                os._exit(3)
            case "exit with 0":
                os._exit(0)
            case "hangs":
                time.sleep(600)
            case "returns":
                return
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 of 3: ValueError: that is wrong"),
        ("raise and exit slowly", "rank 1 of 2: ValueError: that is wrong"),  # on a busy machine
        ("killed", "rank 1 of 2 was ended by SIGKILL"),
        ("exit", "rank 1 of 2 exited with 3"),
        ("exit with 0", "rank 1 of 2 ended with status 0 before it returned"),
    ],
)
def test_the_error_names_the_failed_rank_not_those_that_wait_for_it(how, message, tmp_path):
    failed_at = tmp_path / "failed_at"
    with pytest.raises(RankError) as raised:
        launch(fail, how, failed_at, ranks=3 if how == "raise" else 2)
    assert str(raised.value) == message
    assert raised.value.rank == 1
    assert time.time() - float(failed_at.read_text()) < 60


def test_waiting_for_a_rank_that_has_returned_is_reported():
    """This happens if a rank has fewer batches than the others."""
    message = "rank 0 of 2: RuntimeError: rank 1 has already returned while this rank waited"
    with pytest.raises(RankError, match=message):
        launch(fail, "returns", ranks=2)


@pytest.mark.parametrize(("polls", "exited"), [(5, []), (30, [1])])
def test_an_early_exit_is_reported_after_several_polls(tmp_path, monkeypatch, polls, exited):
    """The launcher may be about to notice it, and know the reason. Here an hour passes between polls."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f"1.{dead.pid}").touch()
    hours, reported = itertools.count(), []
    monkeypatch.setattr(time, "monotonic", lambda: 3600.0 * next(hours))
    done = types.SimpleNamespace(wait=lambda timeout: next(hours) > polls)
    _watch(str(tmp_path), done, reported.append, lambda: None)
    assert reported == exited


def test_a_single_rank_that_exits_with_status_0_is_an_error():
    with pytest.raises(RankError, match="rank 0 of 1 ended with status 0 before it returned"):
        launch(os._exit, 0, ranks=1)


def test_a_hanging_rank_ends_the_job_after_the_timeout(tmp_path):
    failed_at = tmp_path / "failed_at"
    with pytest.raises(RankError, match=r"rank 0 of 2: .*([Tt]imed out|timeout)"):
        launch(fail, "hangs", failed_at, ranks=2, timeout_s=10)
    assert time.time() - float(failed_at.read_text()) < TIMEOUT_S


def test_more_ranks_than_can_be_started_are_refused():
    with pytest.raises(ValueError, match="ranks is 300; at most 100 can be started here"):
        launch(total, 1, ranks=300)


def test_an_unknown_network_interface_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME is 'nope0'; this machine has"):
        launch(total, 1, ranks=2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=l")
    with pytest.raises(ValueError, match="NCCL_SOCKET_IFNAME is '=l'"):
        check_interfaces()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker")
    check_interfaces()


def run_rank(code, **environment):
    """Runs code in a process with the environment of a torchrun rank."""
    settings = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        **environment,
    }
    command = [sys.executable, "-c", code]
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **settings, "PYTHONPATH": path},
    )


BENCH = (
    "from stepgauge.cli import main\n"
    "if __name__ == '__main__':\n"
    "    main(['bench', 'comm', '--device', 'cpu', '--size', '4K', '--ranks', '2', '--out', {out!r}])"
)


def test_a_port_in_use_is_reported(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        run = run_rank(
            BENCH.format(out=str(tmp_path)),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(taken.getsockname()[1]),
        )
    assert run.returncode == 1
    assert "rank 0 of 2 cannot join the others at 127.0.0.1" in run.stderr
    assert "EADDRINUSE" in run.stderr
    assert "Traceback" not in run.stderr


TWO_GROUPS = """
import gc, os, weakref
import torch, torch.distributed as dist
from stepgauge.parallel.communication.collectives import group_with_backend
from stepgauge.runtime.world import joined_world, process_group
made = []
for timeout_s in (30, 60):
    with process_group(joined_world(), backend="gloo", device=torch.device("cpu"), timeout_s=timeout_s):
        group = group_with_backend("gloo")
        assert group_with_backend("gloo") is group
        dist.all_reduce(torch.ones(1), group=group)
        made.append(weakref.ref(group))
        del group
    gc.collect()
    assert made[-1]() is None, "a group outlives the default group"
"""


def run_alone(code):
    """Runs code in a process as the only rank of torchrun."""
    return run_rank(code, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # any free port


THREADS = """
import contextlib, glob, time
import torch, torch.distributed as dist
from stepgauge.runtime.launch import launch
def threads():
    names = []
    for path in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError), open(path) as file:  # a thread may end meanwhile
            names.append(file.read().strip())
    return names
def function():
    import stepgauge.parallel.wrappers
    dist.all_reduce(torch.ones(1))
    assert any("gloo" in name for name in threads()), threads()
launch(function, ranks=1)
deadline = time.monotonic() + 60  # the kernel lists a thread for a moment after it was joined
while any("gloo" in name for name in threads()) and time.monotonic() < deadline:
    time.sleep(0.05)
assert not any("gloo" in name for name in threads()), threads()
"""


def test_successive_groups_share_a_rendezvous_and_leave_no_threads():
    """Groups created within a default group end with it.

    Threads of Gloo that outlive their group can abort the interpreter at exit.
    """
    run = run_alone(TWO_GROUPS + THREADS)
    assert run.returncode == 0, run.stderr


def test_a_number_of_ranks_other_than_torchruns_is_refused(monkeypatch):
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="ranks is 3; torchrun has started 2"):
        launch(total, 1, ranks=3)


# A process that imports torch and forks, so that there are two parents.
PARENTS = """
import os, pathlib, sys
from stepgauge.runtime.launch import launch
import ranks_that_sleep
if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1] if os.fork() else sys.argv[2])
    (folder / "parent").write_text(str(os.getpid()))
    launch(ranks_that_sleep.sleep, str(folder), ranks=2)
"""
SLEEPER = """
import os, pathlib, time
import torch.distributed as dist
def sleep(folder):
    draft = pathlib.Path(folder, f"draft{dist.get_rank()}")
    draft.write_text(str(os.getpid()))
    draft.rename(pathlib.Path(folder, f"pid{dist.get_rank()}"))
    time.sleep(600)
"""


def test_ranks_end_with_their_parent(tmp_path):
    """One parent is interrupted, the other killed."""
    (tmp_path / "ranks_that_sleep.py").write_text(SLEEPER)
    (tmp_path / "main.py").write_text(PARENTS)
    folders = {sent: tmp_path / sent.name for sent in (signal.SIGINT, signal.SIGKILL)}
    for folder in folders.values():
        folder.mkdir()
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *sys.path])
    first = subprocess.Popen(
        [sys.executable, tmp_path / "main.py", *folders.values()],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
        # ignored where tests run in the background
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    files = [folder / f"pid{rank}" for folder in folders.values() for rank in range(2)]
    assert wait_for(lambda: all(file.exists() for file in files))
    for sent, folder in folders.items():
        os.kill(int((folder / "parent").read_text()), sent)
    first.wait()
    assert wait_for(lambda: not any(alive(int(file.read_text())) for file in files))


def is_interrupted(function, position):
    """Calls function() and raises KeyboardInterrupt at its opcode number `position`.

    Returns False if it has fewer opcodes, with those of the functions that it calls.
    """
    left = position

    def trace(frame, event, _):
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 gives no events for opcodes
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_point_of_a_wait_does_not_block_later_calls():
    """threading.Event fails here: it can keep its lock."""
    for position in itertools.count():
        ended = _End()
        if not is_interrupted(lambda ended=ended: ended.wait(1e-3), position):
            break
        setter = threading.Thread(target=ended.set, daemon=True)
        setter.start()
        setter.join(60)
        assert not setter.is_alive(), position
        assert ended.wait(60) and ended.is_set()
    assert position > 5


def test_a_wait_without_a_limit_never_blocks_for_long():
    """A Ctrl-C that arrives right before a lock blocks does not wake it."""
    ended, blocked = _End(), []

    class Lock:
        def acquire(self, timeout=-1):
            blocked.append(timeout)
            ended._is_set = len(blocked) == 3

    ended._before = Lock()
    ended.join()
    assert len(blocked) == 3 and all(0 < timeout <= 1 for timeout in blocked)


@pytest.mark.parametrize("is_started", [False, True])
def test_an_interrupt_while_the_launchers_thread_starts_leaves_no_ranks(monkeypatch, is_started):
    before = set(multiprocessing.active_children())
    ranks = Ranks(time.sleep, 600, ranks=1)
    start = ranks._launcher.start

    def interrupted_start():
        if is_started:
            start()
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks._launcher, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt), ranks:
        pass
    assert ranks.running is not is_started
    assert not set(multiprocessing.active_children()) - before


@pytest.fixture
def ctrl_c_raises():
    """It is ignored where tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_delayed_until_the_block_ends(ctrl_c_raises):
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_delayed():
        signal.raise_signal(signal.SIGINT)
        done.append("the block")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_while_handlers_are_restored_reaches_its_own_handler(ctrl_c_raises, monkeypatch):
    """The first handler that stands again raises, before the second does."""
    received, restore = [], signal.signal
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))

    def interrupted_restore(number, handler):
        restore(number, handler)
        if handler is signal.default_int_handler:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt), interrupts_delayed():
            monkeypatch.setattr(signal, "signal", interrupted_restore)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGTERM)
        assert received == ["SIGTERM"]
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGTERM, before)


class InterruptedCondition:
    """A condition; Ctrl-C arrives when the main thread has acquired its lock."""

    def __init__(self, condition):
        self.condition, self.is_interrupted = condition, False

    def __enter__(self):
        self.condition.__enter__()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self.is_interrupted:
            self.is_interrupted = True
            signal.raise_signal(signal.SIGINT)

    def __exit__(self, *error):
        return self.condition.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self.condition, name)


def test_an_interrupt_inside_a_threads_start_leaves_no_ranks(ctrl_c_raises, monkeypatch):
    """The thread would wait forever for the lock of its own start."""
    ranks = Ranks(time.sleep, 600, ranks=1)
    started = ranks._launcher._started
    started._cond = InterruptedCondition(started._cond)
    with pytest.raises(KeyboardInterrupt), ranks:
        pass
    assert started._cond.is_interrupted and not ranks.running


def test_an_interrupt_ends_although_the_launcher_hangs(monkeypatch):
    monkeypatch.setattr(launch_module, "NOTICED_S", 0.5)
    monkeypatch.setattr(launch_module, "stop_server", lambda: None)
    hangs = threading.Event()
    monkeypatch.setattr(launch_module, "elastic_launch", lambda *_: lambda *_: hangs.wait())
    ranks = Ranks(time.sleep, 600, ranks=1)
    try:
        with pytest.raises(KeyboardInterrupt), ranks:
            raise KeyboardInterrupt
        assert not hangs.is_set()
    finally:
        hangs.set()
        ranks._launcher.join()


def test_a_second_interrupt_leaves_no_ranks(monkeypatch):
    """The first one ends the ranks, and the second arrives while they end."""
    before = set(multiprocessing.active_children())
    ranks = Ranks(time.sleep, 600, ranks=1)
    wait = ranks._ended.wait

    def interrupted_wait(timeout_s):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait(timeout_s)

    with pytest.raises(KeyboardInterrupt), ranks:
        assert wait_for(lambda: set(multiprocessing.active_children()) - before)
        monkeypatch.setattr(ranks._ended, "wait", interrupted_wait)
        raise KeyboardInterrupt
    monkeypatch.undo()
    try:
        assert wait_for(lambda: not ranks.running, 60)
    finally:
        ranks.__exit__(KeyboardInterrupt)


def test_an_error_raised_while_handling_a_lost_peer_is_a_consequence():
    """Such a rank waits, so that the launcher reports the rank that died.

    Otherwise it would report a checkpoint that could not be written, for example.
    """
    with pytest.raises(ValueError, match="cannot write") as raised:
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError:
            raise ValueError("cannot write") from None
    assert _is_consequence(raised.value) and not _is_consequence(ValueError("cannot write"))
