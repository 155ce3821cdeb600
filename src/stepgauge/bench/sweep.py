"""Runs many specs, one after another, each in a process of its own, each record on disk before the
next begins.
"""

import contextlib
import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

import torch

from stepgauge import bench
from stepgauge.bench.ranks import OnRanks, run_here, with_launchers
from stepgauge.measure.environment import environment
from stepgauge.runtime.fork_server import preload
from stepgauge.runtime.host import thread_settings
from stepgauge.runtime.launch import RankError
from stepgauge.runtime.load_file import user_line
from stepgauge.runtime.progress import Hear
from stepgauge.runtime.torchrun import is_first_process
from stepgauge.runtime.workers import Workers, run_isolated
from stepgauge.spec.disturbance import MISSED_CORES, is_disturbed, with_tries
from stepgauge.spec.fallbacks import with_fallbacks
from stepgauge.spec.record import Record, now
from stepgauge.spec.store import FAILURES, RunStore
from stepgauge.spec.turns import of_turns, turns_together

preload(*(f"{bench.__name__}.{module.name}" for module in pkgutil.iter_modules(bench.__path__)))
MOST_TRIES = 3  # of a row that was disturbed
MOST_HOPELESS = 3  # rows that stay disturbed in all of them: the machine is busy
LEAST_REPETITIONS = 5  # of a row whose spread says something


@dataclasses.dataclass(frozen=True)
class Job:
    """A spec (a dataclass with `kind` and `device`) and what turns it into a record: a function, or
    an OnRanks.

    Jobs that name the same `process` and follow one another share one, for as long as each of them
    gives its record. `provenance` is that of the record: a prediction is a job too.
    """

    run: Callable[[Any], Record]
    spec: Any
    process: str = ""
    provenance: str = "measured"

    @property
    def asked(self) -> Record:
        """The record as far as it is known before the run."""
        return Record.of(self.spec, provenance=self.provenance)


@dataclasses.dataclass(frozen=True)
class JobResult:
    job: Job
    record: Record
    was_there: bool  # measured by an earlier run of the same sweep


def sweep(
    jobs: Sequence[Job],
    store: RunStore,
    *,
    fresh: bool = False,
    starting: Callable[[Job], None] = lambda job: None,
    hear: Hear = lambda text: None,
    is_command: bool = False,
) -> Iterator[JobResult]:
    """Yields each job's record, in order, when it is on disk.

    What the store already holds for the same spec, device and torch version is not measured again
    unless `fresh`; failed rows are. An error of one job is its record (status oom or failed), and
    the sweep goes on. `starting` is told a job at each of its tries, `hear` what it does then.
    `is_command`: nothing in this process has chosen its threads. Raises StoreError if a record cannot
    be written.
    """
    store.prepare()
    done = {} if fresh else _done(store)
    with Workers(hear) as processes:
        rows = _Rows(store.folder, processes, starting, is_command)
        for job in jobs:
            identity = rows.asked(job).identity
            known = done.get(identity)
            if known:
                yield JobResult(job, known, was_there=True)
                continue
            done[identity] = record = rows.measured(job)
            store.append(record)
            yield JobResult(job, record, was_there=False)


def sweep_in_turns(
    jobs: Sequence[Job],
    store: RunStore,
    *,
    turns: int,
    fresh: bool = False,
    starting: Callable[[Job], None] = lambda job: None,
    hear: Hear = lambda text: None,
    is_command: bool = False,
) -> Iterator[JobResult]:
    """As `sweep`, but every row is measured so many times, all rows once before any a second time,
    and back in the order in which the turn before came. Its record is that of the median turn, as
    spec.turns makes it.

    Rows that the store already holds are measured again unless they had their turns together.
    """
    store.prepare()
    done = {} if fresh else _done(store)
    with Workers(hear) as processes:
        rows = _Rows(store.folder, processes, starting, is_command)
        known = [done[i] for job in jobs if (i := rows.asked(job).identity) in done]
        if len(known) == len(jobs) and turns_together(known) >= turns:
            for job, record in zip(jobs, known, strict=True):
                yield JobResult(job, record, was_there=True)
            return
        began = now()
        measured: list[list[Record]] = [[] for _ in jobs]
        for left in reversed(range(turns)):
            places = range(len(jobs))
            for place in reversed(places) if left % 2 else places:
                own = measured[place]
                if not own or own[-1].status == "ok":
                    own.append(rows.measured(jobs[place]))
                    store.append(of_turns(own, began))
                if not left:
                    yield JobResult(jobs[place], of_turns(own, began), was_there=False)


def _done(store: RunStore) -> dict[tuple[str, ...], Record]:
    return {r.identity: r for r in store.read().records if r.status != "failed"}


class _Rows:
    """Measures jobs in the processes; what goes wrong is told in the folder."""

    def __init__(
        self, folder: Path, processes: Workers, starting: Callable[[Job], None], is_command: bool
    ):
        self.folder, self.processes, self.starting = folder, processes, starting
        self.is_command = is_command
        self.environments: dict[str, dict[str, Any]] = {}
        self.calm = Calm()

    def asked(self, job: Job) -> Record:
        """The record as far as it is known before the run, with where it will be measured."""
        device = job.spec.device
        if device not in self.environments:
            here = _environment(torch.device(device), is_command=self.is_command)
            self.environments[device] = here
        return dataclasses.replace(job.asked, environment=self.environments[device])

    def measured(self, job: Job) -> Record:
        measure = functools.partial(
            _measure, job, self.asked(job), self.folder, self.processes, self.starting
        )
        record = stamped(self.calm.measured(measure))
        if record.status != "ok":
            self.processes.close()
        return record


def _environment(device: torch.device, *, is_command: bool) -> dict[str, Any]:
    """As a process of its own has it: naming a GPU takes hundreds of MiB of it. Of a CPU a command
    itself has the same, and starts no process where all rows are on disk.
    """
    if is_command and device.type == "cpu":
        return {**environment(device), "thread_settings": thread_settings()}
    found: dict[str, Any] = run_isolated(environment, device)
    return found


class Calm:
    """Measures disturbed rows again, until that has helped none of a few."""

    def __init__(self) -> None:
        self._hopeless = 0

    def measured(self, measure: Callable[[], Record]) -> Record:
        """The record of the first measurement that nothing disturbed, else of the last.

        All ranks of torchrun decide alike, by the record that they share.
        """
        most = MOST_TRIES if self._hopeless < MOST_HOPELESS else 1
        record, tries = measure(), 1
        while _is_worth_another(record) and tries < most:
            record, tries = measure(), tries + 1
        if _is_worth_another(record):
            self._hopeless += 1
        return with_tries(record, tries)


def _is_worth_another(record: Record) -> bool:
    """Whether a row was disturbed: by other work on its cores, or by the spread of enough
    repetitions that followed a warm-up.
    """
    if not is_disturbed(record) or record.spec.get("warmup") == 0:
        return False
    if MISSED_CORES in record.metrics:
        return True
    counts = [sample.n for sample in record.metrics.values() if sample.unit == "ms"]
    return max(counts) >= LEAST_REPETITIONS


def stamped(record: Record) -> Record:
    """The record with the time of now, and with what ran in place of kernels that could not."""
    return dataclasses.replace(with_fallbacks(record), created=now())


def _measure(
    job: Job, asked: Record, folder: Path, processes: Workers, starting: Callable[[Job], None]
) -> Record:
    """The record of the job; the traceback of one that failed goes to a file beside the records."""
    starting(job)
    try:
        if isinstance(job.run, OnRanks):
            record = processes.call(job.run, job.spec, **job.run.settings(job.spec))
        else:
            record = processes.call(_run, job, share=job.process)
        together = {**record.environment, **asked.environment}
        return dataclasses.replace(record, environment=together)
    except (RankError, ValueError) as error:
        reason = getattr(error, "reason", "") or str(error)
        if _ran_out_of_memory(job, error):
            return dataclasses.replace(asked, status="oom", note=reason)
        if is_first_process():
            _log(f"{asked.key}\n{getattr(error, 'trace', '') or error}\n", folder)
        return dataclasses.replace(asked, status="failed", note=what_failed(error, job.spec))


def _ran_out_of_memory(job: Job, error: Exception) -> bool:
    """A single process that is killed was, as a rule, ended by the system for its memory."""
    if getattr(error, "type", "") == MemoryError.__name__:
        return True
    return not isinstance(job.run, OnRanks) and getattr(error, "ended_by", None) == SIGKILL


def _log(text: str, folder: Path) -> None:
    # The record matters more than the log: a full disk must not cost it.
    with contextlib.suppress(OSError), (folder / FAILURES).open("a") as log:
        log.write(text)


def _run(job: Job) -> Record:
    return with_launchers(run_here(job.run, job.spec))


def what_failed(error: Exception, spec: Any) -> str:
    """The error's first line; where a user's code raised it, after the file and the line."""
    file = getattr(getattr(spec, "model", spec), "file", "")
    where = user_line(getattr(error, "trace", ""), Path(file)) if file else ""
    message = str(error).strip().partition("\n")[0][:300] or "no message"
    return f"{where}: {message}" if where else message
