"""Shared by commands that measure rows: their options, the sweep with its progress bar, and the exit
status at the end.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from stepgauge.cli.console import (
    Format,
    info,
    print_records,
    progress,
    warn,
)
from stepgauge.cli.earlier_rows import earlier_rows
from stepgauge.cli.options import Values
from stepgauge.cli.pace import Pace
from stepgauge.cli.row_progress import RowProgress
from stepgauge.report.names import describe, labels
from stepgauge.runtime.host import has_only_cpu
from stepgauge.runtime.torchrun import torchrun_numbers
from stepgauge.spec.fallbacks import what_ran
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.hardware_files import file_named
from stepgauge.spec.options import device_name
from stepgauge.spec.store import FAILURES, RunStore
from stepgauge.spec.user_model import UserModel

if TYPE_CHECKING:
    from stepgauge.bench.sweep import Job
    from stepgauge.spec.record import Record

DEVICE_OF_FILE = "that of the hardware file"  # the default of --device of predictions


def folder_argument(type_: Any, tokens: Sequence[Token]) -> Path:
    """Reads --out. Before anything is imported or measured, raises ValueError for an empty text, which
    would mean the working folder, and StoreError if the folder cannot be written.
    """
    if not tokens[0].value:
        raise ValueError(f"{tokens[0].keyword or 'out'} is empty; name a folder")
    store = RunStore(tokens[0].value)
    store.require_possible()
    return store.folder


def device_argument(type_: Any, tokens: Sequence[Token]) -> str:
    """Reads --device. Raises ValueError for a text that cannot name a device."""
    return device_name(tokens[0].value)


def with_device_of(file: HardwareFile, values: Values) -> Values:
    """Returns the values with the hardware file's device as the default of --device."""
    given = {name: value for name, value in values.items() if value != (DEVICE_OF_FILE,)}
    return {"device": (file.device_kind,), **given}


def hardware_argument(type_: Any, tokens: Sequence[Token]) -> Path:
    """Reads --hardware. Raises ValueError for a missing file before anything is imported or measured."""
    return file_named(tokens[0].value)


Out = Annotated[
    Path, Parameter(help="Folder where the records are saved.", converter=folder_argument)
]
Device = Annotated[
    str,
    Parameter(
        help="cpu, cuda, cuda:1 or mps; auto picks the fastest available.",
        converter=device_argument,
    ),
]
Fresh = Annotated[bool, Parameter(help="Measure again the rows that the folder already has.")]
Turns = Annotated[
    int,
    Parameter(
        help="Measure all rows this many times, one round after another, so that drift in the "
        "machine's speed affects them alike. Advice in reports needs such rows.",
    ),
]
RowFormat = Annotated[Format, Parameter(help="Output format.")]


class RunFailedError(Exception):
    """A measurement or training run failed; the message is one sentence."""


class TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM, for example from a scheduler. Handled like Ctrl-C."""


def resolve_devices_and_models(specs: Sequence[Any]) -> list[Any]:
    """Resolves each spec's device and tries each user's model.

    Raises ValueError for a device that is not available, or a file that does not define the model.
    """
    resolved = resolve_devices(specs)
    require_models(resolved)
    return resolved


def resolve_devices(specs: Sequence[Any]) -> list[Any]:
    """Returns the specs with their devices resolved. Raises ValueError for one not available."""
    devices = {name: resolve_device(name) for name in {spec.device for spec in specs}}
    return [dataclasses.replace(spec, device=devices[spec.device]) for spec in specs]


def resolve_device(device: str) -> str:
    """Returns the device's full name. Imports torch only if it could be other than the CPU."""
    if device == "cpu" or (device == "auto" and has_only_cpu()):
        return "cpu"

    from stepgauge.measure.devices import resolve

    return str(resolve(device))


def require_models(specs: Sequence[Any]) -> None:
    """Tries each user's model. Raises ValueError for a file that does not define it."""
    models = (getattr(spec, "model", None) for spec in specs)
    for model in dict.fromkeys(model for model in models if isinstance(model, UserModel)):
        from stepgauge.train.user_model import problem_of

        require_usable(model.file, problem_of, model)


def require_usable(file: object, problem: Callable[..., str | None], *arguments: Any) -> None:
    """Raises ValueError with the sentence that `problem(*arguments)` returns, if any, or if the
    user's file cannot be imported.

    Runs in a separate process, because the file may use a device, exit or crash.
    """
    import stepgauge.bench.sweep  # noqa: F401 - sets the modules that the fork server preloads
    from stepgauge.runtime.launch import RankError
    from stepgauge.runtime.workers import run_isolated

    try:
        message = run_isolated(problem, *arguments)
    except RankError as error:
        message = f"{file} cannot be imported: {error}"
    if message:
        raise ValueError(message)


def canonical_specs(specs: Sequence[Any]) -> list[Any]:
    """Returns the canonical specs, each once, and prints which options have no effect in some rows.

    Raises ValueError for an option that has no effect in any row.
    """
    canonical = [spec.canonical() for spec in specs]
    changed = collections.Counter(
        field.name
        for before, after in zip(specs, canonical, strict=True)
        for field in dataclasses.fields(before)
        if getattr(before, field.name) != getattr(after, field.name)
    )
    for name, count in changed.items():
        if count == len(specs):
            value = getattr(specs[0], name)
            raise ValueError(f"{name} is {value!r}, which has no effect here: leave it out")
        info(
            f"{name} has no effect in {count} of {len(specs)} rows; rows that differ only in it "
            "run once"
        )
    return list(dict.fromkeys(canonical))


def with_torchrun_ranks(values: Values) -> Values:
    """Returns the values with the `ranks` and `nodes` of torchrun, if it started this process.

    Raises ValueError for several nodes without torchrun.
    """
    numbers = torchrun_numbers()
    if numbers is None:
        if values.get("nodes", (1,)) != (1,):
            raise ValueError(f"nodes is {values['nodes'][-1]}; start several nodes with torchrun")
        return values
    _, ranks, _, local_ranks = numbers
    return {"ranks": (ranks,), **values, "nodes": (ranks // local_ranks,)}


def usable_jobs(specs: Sequence[Any], out: Path) -> list["Job"]:
    """Returns the jobs that measure the specs. Raises ValueError for a user's model that is not
    defined, and for options that exclude each other.
    """
    from stepgauge.bench.jobs import checked_jobs

    require_models(specs)
    return checked_jobs(specs, out)


def measure(
    specs: Sequence[Any],
    out: Path,
    *,
    fresh: bool,
    check: Callable[[], None] = lambda: None,
) -> list["Record"]:
    """Returns the records of all specs. If the folder already has all of them they are read without
    importing torch; otherwise `check` is called, which may raise ValueError, and they are measured.
    """
    earlier = [] if fresh else earlier_rows(specs, out)
    if earlier:
        print_notes(earlier, out, reused=len(earlier))
        return earlier
    check()
    return run_jobs(usable_jobs(specs, out), out, fresh=fresh)


def print_rows(records: Sequence["Record"], format: Format) -> None:
    """Prints the rows. Raises RunFailedError instead if the only one failed."""
    require_single_success(records, format)
    print_records(records, format)


def store_for(out: Path) -> RunStore:
    """Returns the folder's run store; under torchrun, one that all ranks share."""
    if torchrun_numbers() is None:
        return RunStore(out)

    from stepgauge.bench import shared_store

    return shared_store.store_for(out)


def run_jobs(
    jobs: Sequence["Job"],
    out: Path,
    *,
    fresh: bool,
    turns: int = 1,
    names_of: Callable[[Sequence["Record"]], list[str]] = labels,
    after_row: Callable[["Job", "Record"], None] = lambda job, record: None,
    probes: Collection[tuple[str, ...]] = (),
) -> list["Record"]:
    """Measures each job once, or in several turns, and returns the records of all, including those of
    earlier runs. Shows a progress bar and a line for each row.

    names_of   returns the names that the rows have on the screen
    after_row  called with each job and its record before the next row begins
    probes     identities of jobs that are measured for the row after them, which are no rows themselves
    """
    from stepgauge.bench.sweep import sweep, sweep_in_turns

    store = store_for(out)
    jobs = list({job.pending.identity: job for job in jobs}.values())
    names = names_by_identity([job.pending for job in jobs], names_of)
    records: list[Record] = []
    reused = 0
    interruption = _report_interruption(records, len(jobs), store.folder)
    pace = Pace(turns * (len(jobs) - len(probes)), "rows" if turns == 1 else "measurements")
    with interruption, store.held(), progress(pace.total, pace.noun) as (bar, task):
        bar.update(task, description="starting", pace=pace)
        rows = RowProgress(names, pace, bar, task, probes)
        for problem in store.read().problems:
            warn(problem)
        run = sweep if turns == 1 else functools.partial(sweep_in_turns, turns=turns)
        outcomes = run(
            jobs, store, fresh=fresh,
            starting=rows.start, hear=rows.update, reusing=rows.reuse, is_command=True,
        )  # fmt: skip
        for outcome in outcomes:
            records.append(outcome.record)
            reused += outcome.is_reused
            rows.finish(outcome)
            after_row(outcome.job, outcome.record)
    print_notes(records, store.folder, reused)
    return records


def names_by_identity(
    rows: Sequence["Record"], names_of: Callable[[Sequence["Record"]], list[str]]
) -> dict[Any, str]:
    """Returns the names of pending rows by identity. They say whether a row is measured or modelled only
    where nothing else tells two rows apart.
    """
    names = names_of([dataclasses.replace(row, provenance="measured") for row in rows])
    if len(set(names)) < len(names):
        names = names_of(rows)
    return {row.identity: name for row, name in zip(rows, names, strict=True)}


@contextlib.contextmanager
def _report_interruption(records: Sequence["Record"], total: int, folder: Path) -> Iterator[None]:
    """Adds to an interrupt how many rows are saved. Raises RunFailedError if the ranks have lost
    contact.
    """
    from stepgauge.runtime.world import GroupError

    try:
        yield
    except GroupError as error:
        raise RunFailedError(str(error)) from error
    except KeyboardInterrupt as interrupt:
        saved = f"{len(records)} of {total} rows are in {folder}; rerun the command to continue"
        none = "no row has been measured yet"
        raise type(interrupt)(saved if records else none) from None


def print_notes(records: Sequence["Record"], folder: Path, reused: int) -> None:
    """Prints which kernels fell back or were launched how, where tracebacks are, and how many rows
    were measured before.
    """
    for sentence in dict.fromkeys(note for record in records for note in what_ran(record)):
        info(sentence)
    if any(record.status == "failed" for record in records):
        info(f"tracebacks of the failed rows: {folder / FAILURES}")
    if reused:
        info(
            f"{reused} of {len(records)} rows were already in {folder}; --fresh measures them again"
        )


def require_single_success(records: Sequence["Record"], format: Format) -> None:
    """Raises RunFailedError if the only measured row failed, before a table repeats the message."""
    measured = [record for record in records if record.provenance == "measured"]
    if format == "table" and len(measured) == 1 and measured[0].status == "failed":
        require_success(measured)


def require_success(records: Sequence["Record"]) -> None:
    """Raises RunFailedError if a row failed, or if no row has a result. A row that ran out of memory
    counts as a result next to rows that fit.
    """
    failed = [record for record in records if record.status == "failed"]
    if failed and len(records) == 1:
        raise RunFailedError(f"{describe(failed[0])} failed: {failed[0].note}")
    if failed:
        raise RunFailedError(f"{len(failed)} of {len(records)} rows failed")
    if records and all(record.status != "ok" and not record.metrics for record in records):
        raise RunFailedError(f"no row has a result: {records[0].note}")
