"""Runs many specs, one after another, each in a process of its own, each record on disk before the
next begins.
"""

import contextlib
import dataclasses
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from signal import SIGKILL
from typing import Any

import torch

from stepgauge import bench
from stepgauge.bench.ranks import OnRanks, RankProcesses, is_first_process
from stepgauge.measure.devices import limit_host_memory, out_of_memory_reason
from stepgauge.measure.environment import environment
from stepgauge.runtime import isolate
from stepgauge.runtime.isolate import ProcessDiedError, RemoteError, Worker, run_isolated
from stepgauge.runtime.launch import RankError
from stepgauge.spec.fallbacks import with_fallbacks
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore

isolate.preload(
    *(f"{bench.__name__}.{module.name}" for module in pkgutil.iter_modules(bench.__path__))
)
FAILURES = "failures.log"


@dataclasses.dataclass(frozen=True)
class Job:
    """A spec (a dataclass with `kind` and `device`) and what turns it into a record: a function, or
    an OnRanks.

    Jobs that name the same `process` and follow one another share one, for as long as each of them
    gives its record.
    """

    run: Callable[[Any], Record]
    spec: Any
    process: str = ""

    @property
    def asked(self) -> Record:
        """The record as far as it is known before the run."""
        return Record(kind=self.spec.kind, spec=dataclasses.asdict(self.spec))


@dataclasses.dataclass(frozen=True)
class Outcome:
    job: Job
    record: Record
    was_there: bool  # measured by an earlier run of the same sweep


def sweep(
    jobs: Sequence[Job],
    store: RunStore,
    *,
    fresh: bool = False,
    starting: Callable[[Job], None] = lambda job: None,
) -> Iterator[Outcome]:
    """Yields each job's record, in order, when it is on disk.

    What the store already holds for the same spec, device and torch version is not measured again
    unless `fresh`; failed rows are. An error of one job is its record (status oom or failed), and
    the sweep goes on. Raises StoreError if a record cannot be written.
    """
    store.prepare()
    done = {} if fresh else {r.identity: r for r in store.read().records if r.status != "failed"}
    environments: dict[str, dict[str, Any]] = {}
    with RankProcesses() as ranks, contextlib.closing(_Processes()) as processes:
        for job in jobs:
            device = job.spec.device
            if device not in environments:
                # In a process of its own: naming a GPU takes hundreds of MiB of it.
                environments[device] = run_isolated(environment, torch.device(device))
            asked = dataclasses.replace(job.asked, environment=environments[device])
            known = done.get(asked.identity)
            if known:
                yield Outcome(job, known, was_there=True)
                continue
            starting(job)
            record = stamped(_measure(job, asked, store.folder, ranks, processes))
            if record.status != "ok":
                processes.close()
            store.append(record)
            done[asked.identity] = record
            yield Outcome(job, record, was_there=False)


class _Processes:
    """The process of the job that runs: a fresh one, or the one before it where both name the same."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._name = ""

    @contextlib.contextmanager
    def of(self, job: Job) -> Iterator[Worker]:
        if self._worker is None or not job.process or job.process != self._name:
            self.close()
            self._worker, self._name = Worker(), job.process
        try:
            yield self._worker
        except BaseException:
            self.close()
            raise
        if not job.process:
            self.close()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def stamped(record: Record) -> Record:
    """The record with the time of now, and with what ran in place of kernels that could not."""
    return dataclasses.replace(
        with_fallbacks(record), created=datetime.now(UTC).isoformat("T", "seconds")
    )


def _measure(
    job: Job, asked: Record, folder: Path, ranks: RankProcesses, processes: "_Processes"
) -> Record:
    """The record of the job; the traceback of one that failed goes to a file beside the records."""
    try:
        if isinstance(job.run, OnRanks):
            processes.close()  # it would hold memory of the device
            record = ranks.measure(job.run, job.spec)
            return dataclasses.replace(
                record, environment={**record.environment, **asked.environment}
            )
        with processes.of(job) as worker:
            return worker.call(_run_within_memory, job, asked)
    except MemoryError as error:
        return dataclasses.replace(asked, status="oom", note=str(error))
    except ProcessDiedError as died:
        status = "oom" if died.signal == SIGKILL else "failed"
        return dataclasses.replace(asked, status=status, note=str(died))
    except (RemoteError, RankError, ValueError) as error:
        if is_first_process():
            _log(f"{asked.key}\n{getattr(error, 'trace', '')}\n", folder)
        return dataclasses.replace(asked, status="failed", note=_first_sentence(str(error)))


def _log(text: str, folder: Path) -> None:
    # The record matters more than the log: a full disk must not cost it.
    with contextlib.suppress(OSError), (folder / FAILURES).open("a") as log:
        log.write(text)


def _run_within_memory(job: Job, asked: Record) -> Record:
    if job.spec.device == "cpu":
        limit_host_memory()
    try:
        return job.run(job.spec)
    except Exception as error:
        reason = out_of_memory_reason(error)
        if reason is None:
            raise
        return dataclasses.replace(asked, status="oom", note=reason)


def _first_sentence(message: str) -> str:
    return message.strip().partition("\n")[0][:300] or "no message"
