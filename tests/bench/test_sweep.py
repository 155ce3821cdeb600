"""Sweeps: each record is on disk once it is measured, whatever happens to the measuring process."""

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.processes import alive, wait_for

from stepgauge.bench.sweep import FAILURES, Job, sweep, sweep_in_turns
from stepgauge.measure.devices import out_of_memory_reason
from stepgauge.report.views import remark
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.store import RunStore
from stepgauge.spec.turns import STEP_MS, turns_together


@dataclasses.dataclass(frozen=True)
class Toy:
    kind: ClassVar[str] = "toy"
    does: str
    size: str = "toy"
    precision: str = "fp32"
    device: str = "cpu"


def run(spec):
    match spec.does:
        case "raise":
            raise RuntimeError("first line\nsecond line")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "host oom":
            torch.empty(2**46, dtype=torch.uint8)
        case "device oom":
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total ..."
            )
    process = Sample.exact(os.getpid(), "process")
    return Record(
        kind="toy", spec=dataclasses.asdict(spec), metrics={"process": process}, environment=here()
    )


def here():
    from stepgauge.measure.environment import environment

    return environment(torch.device("cpu"))


def outcomes(store, *does, **settings):
    return list(sweep([Job(run, Toy(what)) for what in does], store, **settings))


def noisy(spec):
    """Returns a disturbed record, except in the n-th measurement, where n is spec.does."""
    path = Path(spec.size)
    path.write_text(path.read_text() + "." if path.exists() else ".")
    is_calm = len(path.read_text()) == int(spec.does)
    times = [10.0] * 6 if is_calm else [10.0, 10.0, 10.0, 30.0, 30.0, 30.0]
    metrics = {"time_ms": Sample.of(times, "ms")}
    return Record(kind="toy", spec=dataclasses.asdict(spec), metrics=metrics, environment=here())


@pytest.mark.parametrize(
    ("calm", "measured", "message"),
    [
        ("1", 1, ""),
        ("2", 2, ""),
        ("9", 3, "disturbed: p90 is over 1.5 × p10, also in the last of 3"),
    ],
)
def test_a_disturbed_row_is_measured_again_and_marked_if_it_stays_disturbed(
    tmp_path, calm, measured, message
):
    spec = Toy(calm, size=str(tmp_path / "tries"))
    (outcome,) = sweep([Job(noisy, spec)], RunStore(tmp_path / "run"))
    assert (tmp_path / "tries").read_text() == "." * measured
    assert outcome.record.environment.get("measurements", 1) == measured
    row_remark = remark(outcome.record)
    assert row_remark.startswith(message) and bool(row_remark) == bool(message)


def test_retries_stop_after_several_rows_that_stayed_disturbed():
    from stepgauge.bench.sweep import MOST_HOPELESS, MOST_TRIES, Retries

    measured, retries = [], Retries()
    noise = Record(
        kind="toy", spec={}, metrics={"time_ms": Sample.of([1.0, 1.0, 9.0, 9.0, 9.0], "ms")}
    )
    for _ in range(10):
        retries.run(lambda: measured.append(1) or noise)
    assert len(measured) == 10 + MOST_HOPELESS * (MOST_TRIES - 1)


def test_each_row_runs_in_its_own_process(tmp_path):
    store = RunStore(tmp_path)
    rows = outcomes(store, "a", "b")
    processes = {row.record.median("process") for row in rows}
    assert len(processes | {os.getpid()}) == 3
    assert all(row.record.created for row in rows)


@pytest.mark.parametrize(
    ("does", "status", "words"),
    [
        ("raise", "failed", "RuntimeError: first line"),
        ("killed", "oom", "was ended by SIGKILL"),
        ("segfault", "failed", "was ended by SIGSEGV"),
        ("host oom", "oom", "memory ran out at 65536.00 GiB more"),
        ("device oom", "oom", "memory ran out at 2.50 GiB more"),
    ],
)
def test_a_failed_row_has_a_note_and_the_sweep_continues(tmp_path, does, status, words):
    store = RunStore(tmp_path)
    rows = outcomes(store, "before", does, "after")
    assert [row.record.status for row in rows] == ["ok", status, "ok"]
    assert words in rows[1].record.note
    assert "\n" not in rows[1].record.note
    assert [r.status for r in store.read().records] == ["ok", status, "ok"]
    assert rows[1].record.environment["torch"] == torch.__version__
    assert (tmp_path / FAILURES).exists() == (status == "failed")


def test_a_repeated_sweep_reuses_stored_rows(tmp_path):
    store = RunStore(tmp_path)
    first = outcomes(store, "a", "host oom", "raise")
    reused = []
    second = outcomes(store, "b", "a", "host oom", "raise", reusing=reused.extend)
    assert [row.is_reused for row in first] == [False] * 3
    # a failed row is measured again
    assert [row.is_reused for row in second] == [False, True, True, False]
    assert len(reused) == 2  # known before the first row is measured
    assert second[1].record == first[0].record
    again = outcomes(store, "a", fresh=True)
    assert not again[0].is_reused
    assert len(store.read().records) == 6


def timed(spec):
    """Logs the measurement, and returns a step of 1 ms plus 1 ms for each earlier measurement."""
    log = Path(spec.size)
    before = log.read_text() if log.exists() else ""
    log.write_text(before + spec.does)
    if spec.does == "X":
        raise RuntimeError("it always fails")
    metrics = {"step_ms": Sample.exact(1.0 + len(before), "ms")}
    return Record(kind="toy", spec=dataclasses.asdict(spec), metrics=metrics, environment=here())


def test_rounds_of_a_sweep_in_turns_alternate_in_direction(tmp_path):
    store, log = RunStore(tmp_path / "run"), tmp_path / "log"
    jobs = [Job(timed, Toy(name, size=str(log))) for name in "ABX"]
    reasons = []
    starting = lambda job, again: reasons.append(again)  # noqa: E731
    rows = list(sweep_in_turns(jobs, store, turns=3, starting=starting))
    assert reasons == [""] * 3 + ["turn 2 of 3"] * 2 + ["turn 3 of 3"] * 2
    assert log.read_text() == "ABXBAAB"  # the failed row is not measured again
    assert [row.record.spec["does"] for row in rows] == ["A", "B", "X"]
    a, b, x = (row.record for row in rows)
    assert (a.median("step_ms"), b.median("step_ms"), x.status) == (5.0, 4.0, "failed")
    assert a.series[STEP_MS] == [1.0, 5.0, 6.0] and b.series[STEP_MS] == [2.0, 4.0, 7.0]
    assert turns_together([a, b]) == 3 and turns_together([a, x]) == 0
    assert [record.spec["does"] for record in store.read().latest()] == ["A", "B", "X"]
    assert store.read().latest()[:2] == [a, b]

    assert all(row.is_reused for row in sweep_in_turns(jobs[:2], store, turns=3))
    assert [row.is_reused for row in sweep(jobs[:2], store)] == [True, True]
    log.unlink()
    assert not any(row.is_reused for row in sweep_in_turns(jobs[:2], store, turns=3, fresh=True))
    list(sweep(jobs[:1], store, fresh=True))  # only A, so the rows are not from the same rounds
    log.unlink()
    list(sweep_in_turns(jobs[:2], store, turns=2))
    assert log.read_text() == "BAAB"


def test_stored_rows_of_another_device_are_not_reused(tmp_path):
    store = RunStore(tmp_path)
    (row,) = outcomes(store, "a")
    other = RunStore(tmp_path / "other")
    other.prepare()
    other.append(
        dataclasses.replace(row.record, environment={**row.record.environment, "device": "another"})
    )
    assert not outcomes(other, "a")[0].is_reused


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("MPS backend out of memory"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
    ],
    ids=str,
)
def test_out_of_memory_errors_of_all_libraries_are_recognized(error):
    assert "memory ran out" in out_of_memory_reason(error)
    wrapper = RuntimeError("backend='inductor' raised")
    wrapper.__cause__ = error
    assert out_of_memory_reason(wrapper) == out_of_memory_reason(error)


def test_other_errors_are_not_out_of_memory():
    assert out_of_memory_reason(RuntimeError("CUDA error: an illegal memory access")) is None
    assert out_of_memory_reason(ValueError("out of memory")) is None
    assert out_of_memory_reason(MemoryError("needs 3 GiB")) == "needs 3 GiB"


def test_the_record_is_kept_if_the_log_cannot_be_written(tmp_path):
    (tmp_path / FAILURES).mkdir()
    (row,) = outcomes(RunStore(tmp_path), "raise")
    assert row.record.status == "failed"
    assert len(RunStore(tmp_path).read().records) == 1


def test_a_command_whose_rows_are_on_disk_starts_no_process(tmp_path, monkeypatch):
    (first,) = outcomes(RunStore(tmp_path), "a", is_command=True)
    monkeypatch.setattr("stepgauge.bench.sweep.run_isolated", None)
    monkeypatch.setattr("stepgauge.bench.sweep.Workers.call", None)
    (again,) = outcomes(RunStore(tmp_path), "a", is_command=True)
    assert again.is_reused and again.record == first.record


def test_a_spec_that_appears_twice_is_measured_once(tmp_path):
    rows = outcomes(RunStore(tmp_path), "a", "a")
    assert [row.is_reused for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("sent", "status", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_an_interrupt_during_a_row_ends_it_and_keeps_the_others(tmp_path, sent, status, word):
    command = [
        sys.executable,
        "-m",
        "stepgauge",
        "bench",
        "step",
        "--size",
        "nano",
        "--device",
        "cpu",
        "--context",
    ]
    command += ["16", "--seconds", "0,60", "--steps", "1", "--warmup", "0", "--out", str(tmp_path)]
    run = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # ignored where tests run in the background
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    second = "seconds=60.0: warming up for 0 steps, then timing at least 1 step and 60 s\n"
    before = list(itertools.takewhile(lambda line: not line.endswith(second), run.stderr))
    os.killpg(run.pid, sent)
    _, err = run.communicate()
    assert run.returncode == status, [*before, err]
    assert (
        f"stepgauge: {word}: 1 of 2 rows are in" in err and "rerun the command to continue" in err
    )
    assert "Traceback" not in "".join(before) + err
    assert len(RunStore(tmp_path).read().records) == 1


@pytest.mark.parametrize("call", ["workers.run_isolated(int)", "launch.launch(int, ranks=2)"])
def test_an_interrupt_while_the_fork_server_starts_is_reported_once(tmp_path, call):
    (tmp_path / "slow_server.py").write_text(
        "import pathlib, time\n"
        "pathlib.Path('begun').touch()\n"
        "while not pathlib.Path('sent').exists():\n"
        "    time.sleep(0.01)\n"
    )
    code = (
        "import faulthandler, signal\n"
        "from stepgauge.runtime import fork_server, launch, workers\n"
        "faulthandler.register(signal.SIGUSR1)\n"
        "fork_server.preload('slow_server')\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        f"        {call}\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    (tmp_path / "main.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert wait_for(lambda: (tmp_path / "begun").exists())
    os.killpg(process.pid, signal.SIGINT)
    (tmp_path / "sent").touch()
    try:
        out, err = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # writes where its threads wait
        wait_for(lambda: process.poll() is not None, 2)
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(process.communicate()[1])
    own = [line for line in err.splitlines() if "/gloo/" not in line]  # a rank whose peer has ended
    assert (out, own) == ("interrupted\n", [])


def test_an_interrupt_while_a_process_starts_prints_no_traceback(tmp_path):
    """It arrives after the server has forked the process and before that has its arguments."""
    code = """
import os, signal, time
from multiprocessing import forkserver
from stepgauge.runtime import workers

connect = forkserver.connect_to_new_process

def interrupted_connect(fds):
    connected = connect(fds)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    return connected

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    forkserver.connect_to_new_process = interrupted_connect
    try:
        workers.run_isolated(int)
    except KeyboardInterrupt:
        print("interrupted")
"""
    (tmp_path / "main.py").write_text(code)
    command = [sys.executable, str(tmp_path / "main.py")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("interrupted\n", "")


def test_a_killed_parent_leaves_no_process_behind(tmp_path):
    """The measuring process writes its pid, then sleeps for longer than the test waits."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import isolated_sleep\n"
        "from stepgauge.runtime.workers import run_isolated\n"
        "if __name__ == '__main__': run_isolated(isolated_sleep.sleep, sys.argv[2])"
    )
    sleeper = "def sleep(path):\n    pathlib.Path(path).write_text(str(os.getpid()))\n    time.sleep(600)\n"
    (tmp_path / "isolated_sleep.py").write_text(f"import os, pathlib, time\n\n{sleeper}")
    (tmp_path / "main.py").write_text(code)
    process = tmp_path / "process"
    parent = subprocess.Popen([sys.executable, tmp_path / "main.py", str(tmp_path), str(process)])
    child = wait_for(lambda: process.exists() and process.read_text() and int(process.read_text()))
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not alive(child))
