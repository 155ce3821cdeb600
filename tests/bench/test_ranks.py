"""Rows measured by several ranks: one record for all, also if a rank fails, with and without torchrun."""

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from stepgauge.bench import ranks
from stepgauge.bench.rank_figures import time_steps
from stepgauge.bench.ranks import OnRanks, slowest
from stepgauge.bench.sweep import FAILURES, Job, sweep
from stepgauge.measure import devices
from stepgauge.runtime.world import TIMEOUT_S
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.store import RunStore


@dataclasses.dataclass(frozen=True)
class Toy:
    kind: ClassVar[str] = "toy"
    does: str
    ranks: int = 2
    device: str = "cpu"
    log: str = ""  # file to which rank 1 adds the time at which it starts a row


def measure(spec):
    """Returns the process and times of a rank. Rank 1 is slower in the first repetition, rank 0 in the
    second.
    """
    total = torch.ones(1)
    if dist.get_rank() == 1:
        if spec.log:
            with open(spec.log, "a") as log:
                log.write(f"{time.time()}\n")
        match spec.does:
            case "raise":
                raise RuntimeError("first line\nsecond line")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "host oom":
                torch.empty(2**46, dtype=torch.uint8)
    dist.all_reduce(total)
    assert total.item() == spec.ranks
    return os.getpid(), [1.0, 3.0] if dist.get_rank() == 0 else [2.0, 1.0]


def record(spec, values):
    metrics = {
        "process": Sample.of([process for process, _ in values], "process"),
        "row_ms": Sample.of(slowest([times for _, times in values]), "ms"),
    }
    return Record(kind="toy", spec=dataclasses.asdict(spec), metrics=metrics)


RUN = OnRanks(measure, record)


def outcomes(store, *does):
    log = f"{store.folder}.log"
    return list(sweep([Job(RUN, Toy(what, log=log)) for what in does], store))


def test_slowest_takes_the_slowest_rank_of_each_repetition():
    assert slowest([[1.0, 3.0], [2.0, 1.0]]) == [2.0, 3.0]


def test_rows_share_their_processes(tmp_path):
    rows = outcomes(RunStore(tmp_path), "a", "b")
    assert len({row.record.median("process") for row in rows}) == 1
    first = rows[0].record
    assert first.metrics["row_ms"].mean == 2.5
    assert first.environment["hosts"] == [os.uname().nodename] * 2
    assert len(first.environment["devices"]) == 2
    assert first.created


def require_that_none_timed_out(log):
    """Checks that each row ended before a collective that waits for a failed rank times out."""
    starts = [float(line) for line in Path(log).read_text().splitlines()]
    assert all(b - a < TIMEOUT_S for a, b in itertools.pairwise([*starts, time.time()]))


def test_a_failing_rank_ends_its_row_soon_and_the_sweep_continues(tmp_path):
    store = RunStore(tmp_path)
    rows = outcomes(store, "before", "raise", "killed", "host oom", "after")
    require_that_none_timed_out(f"{tmp_path}.log")
    statuses = ["ok", "failed", "failed", "oom", "ok"]
    assert [row.record.status for row in rows] == statuses
    assert [row.record.note for row in rows[1:4]] == [
        "rank 1 of 2: RuntimeError: first line",
        "rank 1 of 2 was ended by SIGKILL",
        "memory ran out at 65536.00 GiB more",
    ]
    assert [r.status for r in store.read().records] == statuses
    assert (tmp_path / FAILURES).read_text().count("RuntimeError: first line") >= 1


def test_a_repeated_sweep_reuses_stored_rows(tmp_path):
    outcomes(RunStore(tmp_path), "a")
    assert [row.is_reused for row in outcomes(RunStore(tmp_path), "a", "b")] == [True, False]


WALK = """
import os
import sys
from stepgauge.bench.shared_store import store_for
from stepgauge.bench.sweep import Job, sweep
from tests.bench.test_ranks import RUN, Toy

def main():
    store = store_for(sys.argv[1])
    jobs = [Job(RUN, Toy(what, log=f"{sys.argv[1]}.log")) for what in sys.argv[2:]]
    with store.held():
        for part in (jobs[:1], jobs):  # the second sweep reuses the row of the first
            for row in sweep(part, store):
                os.write(1, f"{row.is_reused} {row.record.status}\\n".encode())  # atomically

if __name__ == "__main__":
    main()
"""


def torchrun(tmp_path, *does, ranks=2):
    (tmp_path / "walk.py").write_text(WALK)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    return subprocess.run(
        [*command, str(tmp_path / "walk.py"), str(tmp_path / "run"), *does],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_under_torchrun_an_error_fails_its_row_and_a_killed_rank_ends_the_run(tmp_path):
    """All ranks go through the jobs, and rank 0 writes. Stored rows are reused."""
    died = torchrun(tmp_path, "a", "raise", "b", "host oom", "c", "killed", "d")
    assert died.returncode != 0
    require_that_none_timed_out(tmp_path / "run.log")
    records = RunStore(tmp_path / "run").read().records
    assert [(r.spec["does"], r.status) for r in records] == [
        ("a", "ok"), ("raise", "failed"), ("b", "ok"), ("host oom", "oom"), ("c", "ok"),
    ]  # fmt: skip
    assert records[1].note == "rank 1 of 2: RuntimeError: first line"
    assert records[3].note == "memory ran out at 65536.00 GiB more"
    assert (tmp_path / "run" / FAILURES).read_text().count("in measure") == 1
    statuses = sorted(line.split()[1] for line in died.stdout.splitlines())
    assert statuses == ["failed"] * 2 + ["ok"] * 8 + ["oom"] * 2
    assert died.stdout.count("True ok") == 2
    assert records[2].metrics["row_ms"].mean == 2.5


def test_compiled_code_of_a_row_is_dropped_after_it(monkeypatch):
    """The next row's size is then compiled as a static shape, not as a dynamic one."""
    graphs = []
    monkeypatch.setattr(ranks, "limit_host_memory", lambda: None)  # it would limit all later tests

    def measure(spec):
        def backend(graph, inputs):
            graphs.append([x for x in inputs if not isinstance(x, torch.Tensor)])
            return graph.forward

        torch.compile(twice, backend=backend)(torch.ones(spec.micro_batch, 3))

    for size in (4, 1, 8):
        spec = types.SimpleNamespace(compile="blocks", device="cpu", micro_batch=size)
        ranks._run_and_free(measure, spec)
    assert graphs == [[]] * 3


def twice(x):
    return 2 * x


def test_peak_memory_is_counted_over_the_timed_steps(monkeypatch):
    """In the second step, DDP divides its gradients anew: 52.3 instead of 47.4 GiB in 2 of 3 runs."""
    steps, counted_from = [], []
    monkeypatch.setattr(
        devices, "reset_peak_memory", lambda device: counted_from.append(len(steps))
    )
    spec = types.SimpleNamespace(compile="off", warmup=5, steps=3)
    times, _ = time_steps(spec, {"forward": lambda: steps.append(1)}, torch.device("cpu"))
    assert counted_from == [5]
    assert len(steps) == 8 and len(times["forward"]) == 3
