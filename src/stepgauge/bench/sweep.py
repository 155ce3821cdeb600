"""Runs many specs one after another, each in its own process. Each record is on disk before the next
spec is measured.
"""

import contextlib
import dataclasses
import itertools
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
from stepgauge.runtime.progress import Listener
from stepgauge.runtime.torchrun import is_first_process
from stepgauge.runtime.workers import Workers, run_isolated
from stepgauge.spec.disturbance import is_disturbed, with_tries
from stepgauge.spec.fallbacks import with_fallbacks
from stepgauge.spec.record import Record, now
from stepgauge.spec.store import FAILURES, RunStore
from stepgauge.spec.turns import of_turns, turns_together

preload(*(f"{bench.__name__}.{module.name}" for module in pkgutil.iter_modules(bench.__path__)))
MOST_TRIES = 3  # measurements of a disturbed row
MOST_HOPELESS = 3  # after so many rows that stayed disturbed, the machine is busy: no more retries
DISTURBED = "it was disturbed"  # why a row is measured again
LEAST_REPETITIONS = 5  # fewer are a quick look, and do not show a spread


@dataclasses.dataclass(frozen=True)
class Job:
    """A spec and the function or OnRanks that turns it into a record.

    run         called with the spec, in another process
    spec        a dataclass with `kind` and `device`
    process     consecutive jobs with the same name share a process until one of them fails
    provenance  the record's provenance: predictions are jobs too
    """

    run: Callable[[Any], Record]
    spec: Any
    process: str = ""
    provenance: str = "measured"

    @property
    def pending(self) -> Record:
        """The record before the run: spec and provenance, no results."""
        return Record.of(self.spec, provenance=self.provenance)


@dataclasses.dataclass(frozen=True)
class JobResult:
    job: Job
    record: Record
    is_reused: bool  # True if an earlier run of the same sweep measured it


Starting = Callable[[Job, str], None]


def sweep(
    jobs: Sequence[Job],
    store: RunStore,
    *,
    fresh: bool = False,
    starting: Starting = lambda job, again: None,
    hear: Listener = lambda text: None,
    reusing: Callable[[Sequence[Job]], None] = lambda jobs: None,
    is_command: bool = False,
) -> Iterator[JobResult]:
    """Measures the jobs and yields each one's record, in order, once it is on disk.

    fresh       measure all rows. By default a row is reused if the store has one with the same spec,
                device and torch version that did not fail.
    starting    called before each measurement with the job and why it is measured again ("" at first)
    hear        called with progress messages of the running job
    reusing     called once, before the first measurement, with the jobs whose rows are reused
    is_command  True if nothing in this process has changed its number of threads

    An error of one job becomes its record (status "oom" or "failed"), and the sweep continues.
    Raises StoreError if a record cannot be written.
    """
    store.prepare()
    stored = {} if fresh else _reusable(store)
    with Workers(hear) as workers:
        rows = _Rows(store.folder, workers, starting, is_command)
        identities = [rows.pending(job).identity for job in jobs]
        reusing([job for job, i in zip(jobs, identities, strict=True) if i in stored])
        for job, identity in zip(jobs, identities, strict=True):
            if identity in stored:
                yield JobResult(job, stored[identity], is_reused=True)
                continue
            stored[identity] = record = rows.measure(job)
            store.append(record)
            yield JobResult(job, record, is_reused=False)


def sweep_in_turns(
    jobs: Sequence[Job],
    store: RunStore,
    *,
    turns: int,
    fresh: bool = False,
    starting: Starting = lambda job, again: None,
    hear: Listener = lambda text: None,
    reusing: Callable[[Sequence[Job]], None] = lambda jobs: None,
    is_command: bool = False,
) -> Iterator[JobResult]:
    """Measures every job `turns` times, in rounds through all jobs, and yields one record per job.

    Every second round runs in reverse order, so that slow drift of the machine affects all rows
    alike. A row's record is that of its median turn (spec.turns). Stored rows are reused only if
    they were all measured in the same rounds. The other arguments are those of `sweep`.
    """
    store.prepare()
    stored = {} if fresh else _reusable(store)
    with Workers(hear) as workers:
        rows = _Rows(store.folder, workers, starting, is_command)
        reused = [stored[i] for job in jobs if (i := rows.pending(job).identity) in stored]
        if len(reused) == len(jobs) and turns_together(reused) >= turns:
            reusing(jobs)
            for job, record in zip(jobs, reused, strict=True):
                yield JobResult(job, record, is_reused=True)
            return
        began = now()
        records_by_job: list[list[Record]] = [[] for _ in jobs]
        for turn in range(1, turns + 1):
            pairs = list(zip(jobs, records_by_job, strict=True))
            if (turns - turn) % 2:  # the last round runs forward and yields the rows in order
                pairs.reverse()
            for job, records in pairs:
                if not records or records[-1].status == "ok":
                    again = f"turn {turn} of {turns}" if turn > 1 else ""
                    records.append(rows.measure(job, again))
                    store.append(of_turns(records, began))
                if turn == turns:
                    yield JobResult(job, of_turns(records, began), is_reused=False)


def _reusable(store: RunStore) -> dict[tuple[str, ...], Record]:
    """Returns the stored records by identity. Failed rows are left out and measured again."""
    return {r.identity: r for r in store.read().records if r.status != "failed"}


class _Rows:
    """Measures jobs in worker processes and logs failures in the store's folder."""

    def __init__(self, folder: Path, workers: Workers, starting: Starting, is_command: bool):
        self.folder, self.workers, self.starting = folder, workers, starting
        self.is_command = is_command
        self.environments: dict[str, dict[str, Any]] = {}
        self.retries = Retries()

    def pending(self, job: Job) -> Record:
        """Returns the record before the run: spec and environment, no results."""
        device = job.spec.device
        if device not in self.environments:
            here = _environment(torch.device(device), is_command=self.is_command)
            self.environments[device] = here
        return dataclasses.replace(job.pending, environment=self.environments[device])

    def measure(self, job: Job, again: str = "") -> Record:
        """Measures the job, again if it was disturbed, and returns the record with its time. `again`
        says why a job that was measured before is measured now.
        """
        pending = self.pending(job)
        reasons = itertools.chain([again], itertools.repeat(DISTURBED))
        record = stamped(self.retries.run(lambda: self._measure_once(job, pending, next(reasons))))
        if record.status != "ok":
            self.workers.close()
        return record

    def _measure_once(self, job: Job, pending: Record, again: str) -> Record:
        self.starting(job, again)
        try:
            if isinstance(job.run, OnRanks):
                record = self.workers.call(job.run, job.spec, **job.run.settings(job.spec))
            else:
                record = self.workers.call(_run, job, share=job.process)
        except (RankError, ValueError) as error:
            if _ran_out_of_memory(job, error):
                reason = getattr(error, "reason", "") or str(error)
                return dataclasses.replace(pending, status="oom", note=reason)
            if is_first_process():
                self._log(f"{pending.key}\n{getattr(error, 'trace', '') or error}\n")
            return dataclasses.replace(pending, status="failed", note=failure_note(error, job.spec))
        environment = {**record.environment, **pending.environment}
        return dataclasses.replace(record, environment=environment)

    def _log(self, text: str) -> None:
        # The record matters more than the log: a full disk must not cost it.
        with contextlib.suppress(OSError), (self.folder / FAILURES).open("a") as log:
            log.write(text)


def _environment(device: torch.device, *, is_command: bool) -> dict[str, Any]:
    """Returns the environment as a worker process has it.

    Reading a GPU's name takes hundreds of MiB of its memory, so a worker does it. A command on a CPU
    has the same environment as its workers, and needs no process if all rows are on disk.
    """
    if is_command and device.type == "cpu":
        return {**environment(device), "thread_settings": thread_settings()}
    result: dict[str, Any] = run_isolated(environment, device)
    return result


class Retries:
    """Repeats disturbed measurements, until a few rows stayed disturbed in all their repetitions."""

    def __init__(self) -> None:
        self._hopeless_rows = 0

    def run(self, measure: Callable[[], Record]) -> Record:
        """Returns the first record that was not disturbed, or else the last one.

        Under torchrun all ranks decide alike, because they share the record.
        """
        most = MOST_TRIES if self._hopeless_rows < MOST_HOPELESS else 1
        record, tries = measure(), 1
        while _should_repeat(record) and tries < most:
            record, tries = measure(), tries + 1
        if _should_repeat(record):
            self._hopeless_rows += 1
        return with_tries(record, tries)


def _should_repeat(record: Record) -> bool:
    """True if the row was disturbed although it had a warm-up and enough repetitions. (A row without
    times is one of calibrate, which counts cores only.)
    """
    if not is_disturbed(record) or record.spec.get("warmup") == 0:
        return False
    counts = [sample.n for sample in record.metrics.values() if sample.unit == "ms"]
    return not counts or max(counts) >= LEAST_REPETITIONS


def stamped(record: Record) -> Record:
    """Returns the record with the current time and a note on kernels that fell back."""
    return dataclasses.replace(with_fallbacks(record), created=now())


def _ran_out_of_memory(job: Job, error: Exception) -> bool:
    """True for a MemoryError, and for a killed single process: the system kills processes mostly
    because memory ran out.
    """
    if getattr(error, "type", "") == MemoryError.__name__:
        return True
    return not isinstance(job.run, OnRanks) and getattr(error, "ended_by", None) == SIGKILL


def _run(job: Job) -> Record:
    return with_launchers(run_here(job.run, job.spec))


def failure_note(error: Exception, spec: Any) -> str:
    """Returns the error's first line, preceded by file and line if a user's code raised it."""
    where = user_line(getattr(error, "trace", ""), getattr(spec, "model", spec))
    message = str(error).strip().partition("\n")[0][:300] or "no message"
    return f"{where}: {message}" if where else message
