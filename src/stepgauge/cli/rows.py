"""What commands that measure rows share: their options, the sweep with its progress bar, the
verdict at the end.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from stepgauge.cli.console import (
    Format,
    error_console,
    print_records,
    progress,
    summary,
    tell,
    warn,
)
from stepgauge.cli.earlier_rows import earlier_rows
from stepgauge.cli.options import Values
from stepgauge.runtime.host import has_only_cpu
from stepgauge.runtime.torchrun import torchrun_numbers
from stepgauge.spec.fallbacks import what_ran
from stepgauge.spec.hardware_files import file_named
from stepgauge.spec.options import device_name
from stepgauge.spec.store import FAILURES, RunStore
from stepgauge.spec.user_model import UserModel

if TYPE_CHECKING:
    from rich.progress import Progress

    from stepgauge.bench.sweep import Job, JobResult
    from stepgauge.spec.record import Record


def named_folder(type_: Any, tokens: Sequence[Token]) -> Path:
    """Raises ValueError for an empty text, which would be the working folder, and StoreError where
    nothing can be written, before anything is loaded.
    """
    if not tokens[0].value:
        raise ValueError(f"{tokens[0].keyword or 'out'} is empty; name a folder")
    store = RunStore(tokens[0].value)
    store.require_possible()
    return store.folder


def named_device(type_: Any, tokens: Sequence[Token]) -> str:
    """Raises ValueError for what no machine calls a device."""
    return device_name(tokens[0].value)


def existing_hardware(type_: Any, tokens: Sequence[Token]) -> Path:
    """Raises ValueError where there is no such file, before anything is loaded or measured."""
    return file_named(tokens[0].value)


Out = Annotated[Path, Parameter(help="Folder of the run.", converter=named_folder)]
Device = Annotated[
    str,
    Parameter(
        help="cpu, cuda, cuda:1, mps; auto takes the fastest there is.", converter=named_device
    ),
]
Fresh = Annotated[
    bool,
    Parameter(help="Measure again what the run already holds."),
]
Turns = Annotated[
    int,
    Parameter(
        help="Measure every row so many times, in turns: a machine whose speed drifts drifts under "
        "all rows alike. What a report advises rests on such rows.",
    ),
]
RowFormat = Annotated[Format, Parameter(help="How the rows are printed at the end.")]


class RunFailedError(Exception):
    """Something that was run failed; the message is one sentence."""


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, which a scheduler sends; what runs ends as at Ctrl-C."""


def resolve_devices(specs: Any) -> list[Any]:
    """The specs with each device checked and named as what it is, and each user's model tried.

    Raises ValueError for a device that is not there, or a file without that model.
    """
    found = with_devices(specs)
    require_models(found)
    return found


def with_devices(specs: Sequence[Any]) -> list[Any]:
    """The specs with each device named as what it is. Raises ValueError for one that is not there."""
    devices = {name: resolved(name) for name in {spec.device for spec in specs}}
    return [dataclasses.replace(spec, device=devices[spec.device]) for spec in specs]


def resolved(device: str) -> str:
    """Its name, without torch where there can be no other than the CPU."""
    if device == "cpu" or (device == "auto" and has_only_cpu()):
        return "cpu"

    from stepgauge.measure.devices import resolve

    return str(resolve(device))


def require_models(specs: Sequence[Any]) -> None:
    """Raises ValueError for a user's file without that model, which is tried."""
    models = (getattr(spec, "model", None) for spec in specs)
    for model in dict.fromkeys(model for model in models if isinstance(model, UserModel)):
        from stepgauge.train.user_model import problem_of

        require_usable(model.file, problem_of, model)


def require_usable(file: object, problem: Callable[..., str | None], *arguments: Any) -> None:
    """Raises ValueError for a user's file that has a problem or cannot be imported: tried in a
    process of its own, for it may take a device, exit or crash.
    """
    import stepgauge.bench.sweep  # noqa: F401 - names what the server of processes preloads
    from stepgauge.runtime.launch import RankError
    from stepgauge.runtime.workers import run_isolated

    try:
        lacks = run_isolated(problem, *arguments)
    except RankError as error:
        lacks = f"{file} cannot be imported: {error}"
    if lacks:
        raise ValueError(lacks)


def distinct(specs: Sequence[Any]) -> list[Any]:
    """The canonical specs, each once; says which options have no effect in how many of them.

    Raises ValueError for one that has none in any.
    """
    kept = [spec.canonical() for spec in specs]
    changed = collections.Counter(
        field.name
        for asked, left in zip(specs, kept, strict=True)
        for field in dataclasses.fields(asked)
        if getattr(asked, field.name) != getattr(left, field.name)
    )
    for name, count in changed.items():
        if count == len(specs):
            value = getattr(specs[0], name)
            raise ValueError(f"{name} is {value!r}, which has no effect here: leave it out")
        tell(
            f"{name} has no effect in {count} of {len(specs)} rows; rows that differ only in it "
            "run once"
        )
    return list(dict.fromkeys(kept))


def of_torchrun(values: Values) -> Values:
    """The values with `ranks` and `nodes` as torchrun has started them, where it has started this
    process.

    Raises ValueError for several nodes without it.
    """
    numbers = torchrun_numbers()
    if numbers is None:
        if values.get("nodes", (1,)) != (1,):
            raise ValueError(f"nodes is {values['nodes'][-1]}; start several nodes with torchrun")
        return values
    _, ranks, _, local_ranks = numbers
    return {"ranks": (ranks,), **values, "nodes": (ranks // local_ranks,)}


def checked_jobs(specs: Sequence[Any], out: Path) -> list["Job"]:
    """What measures the specs. Raises ValueError for what one asks together but cannot have."""
    from stepgauge.bench import jobs

    return jobs.checked_jobs(specs, out)


def usable_jobs(specs: Sequence[Any], out: Path) -> list["Job"]:
    """As checked_jobs, after each user's model was tried."""
    require_models(specs)
    return checked_jobs(specs, out)


def measured(
    specs: Sequence[Any],
    out: Path,
    *,
    fresh: bool,
    require: Callable[[], None] = lambda: None,
) -> list["Record"]:
    """The records of all specs: where an earlier run has left all of them they are read, which loads
    no torch; else they are swept, after what `require` refuses.
    """
    earlier = [] if fresh else earlier_rows(specs, out)
    if earlier:
        tell_of_all(earlier, out, reused=len(earlier))
        return earlier
    require()
    return run_jobs(usable_jobs(specs, out), out, fresh=fresh)


def measure_and_print(specs: Sequence[Any], out: Path, *, fresh: bool, format: Format) -> None:
    """Raises RunFailedError where a row failed, after all are printed."""
    records = measured(specs, out, fresh=fresh)
    print_records(records, format)
    require_success(records)


def store_for(out: Path) -> RunStore:
    """The run at the folder, shared between the ranks where torchrun has started this process."""
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
    then: Callable[["Job", "Record"], None] = lambda job, record: None,
) -> list["Record"]:
    """Sweeps with a progress bar and a line a row, each job once, or in so many turns; returns all
    records, those of earlier runs too. `then` is told each record before the next row begins.
    """
    from stepgauge.bench.sweep import sweep, sweep_in_turns
    from stepgauge.report.names import labels

    store = store_for(out)
    jobs = list({job.asked.identity: job for job in jobs}.values())
    told = labels([job.asked for job in jobs])
    names = {job.asked.identity: name for job, name in zip(jobs, told, strict=True)}
    records: list[Record] = []
    reused = 0
    ends = _ended_in_a_sentence(records, len(jobs), store.folder)
    with ends, store.held(), progress(len(jobs), "rows") as (bar, task):
        bar.update(task, description="starts")
        shown = _Rows(names, bar, task, turns)
        for problem in store.read().problems:
            warn(problem)
        run = sweep if turns == 1 else functools.partial(sweep_in_turns, turns=turns)
        found = run(
            jobs, store, fresh=fresh, starting=shown.begins, hear=shown.does, is_command=True
        )
        for outcome in found:
            records.append(outcome.record)
            reused += outcome.was_there
            shown.ends(outcome)
            then(outcome.job, outcome.record)
    tell_of_all(records, store.folder, reused)
    return records


class _Rows:
    """Rows as people see them go: a bar that says what runs in a terminal, a line for each, and
    where no bar is drawn another at its begin.
    """

    def __init__(
        self, names: Mapping[tuple[str, ...], str], bar: "Progress", task: Any, turns: int
    ):
        self.names, self.bar, self.task = names, bar, task
        self.again = "disturbed, measured again: " if turns == 1 else "again: "
        self.is_alone = len(names) == 1
        self.has_bar = not self.is_alone and error_console.is_terminal
        self.name = ""
        self.tried: collections.Counter[str] = collections.Counter()
        if not self.is_alone and not self.has_bar:
            tell(f"{len(names)} rows: a line for each when it is done, then the table")

    def begins(self, job: "Job") -> None:
        """A row is measured, for the first time or again."""
        self.name = self.names[job.asked.identity]
        self.bar.update(self.task, description=self.name)
        doing = _doing(job, again=self.again if self.tried[self.name] else "")
        self.tried[self.name] += 1
        if doing and not self.has_bar:
            tell(f"{self.name}: {doing}")

    def does(self, text: str) -> None:
        """What the row does now."""
        self.bar.update(self.task, description=f"{self.name}: {text}")

    def ends(self, outcome: "JobResult") -> None:
        self.bar.advance(self.task)
        # a failure that is all there is, require_success tells
        if not outcome.was_there and not (self.is_alone and outcome.record.status == "failed"):
            tell(summary(outcome.record, self.names[outcome.job.asked.identity]))


@contextlib.contextmanager
def _ended_in_a_sentence(records: Sequence["Record"], most: int, folder: Path) -> Iterator[None]:
    """Raises RunFailedError where the ranks have lost one another. An interrupt is told with how
    many rows there are.
    """
    from stepgauge.runtime.world import GroupError

    try:
        yield
    except GroupError as error:
        raise RunFailedError(str(error)) from error
    except KeyboardInterrupt as interrupt:
        kept = f"{len(records)} of {most} rows are in {folder}; the same command goes on from there"
        none = "no row was measured yet"
        raise type(interrupt)(kept if records else none) from None


def _doing(job: "Job", *, again: str) -> str:
    """What is done before a row has figures; nothing of what takes no steps."""
    spec = job.spec
    takes_steps = hasattr(spec, "warmup") and hasattr(spec, "steps")
    if not takes_steps or job.provenance == "modelled":
        return ""
    compiles = "" if getattr(spec, "compile", "off") == "off" else "compiles, "
    seconds = f" for {spec.seconds:g} s" if getattr(spec, "seconds", 0.0) else ""
    return (
        f"{again}{compiles}warms up {spec.warmup} steps, then times at least {spec.steps}{seconds}"
    )


def tell_of_all(records: Sequence["Record"], folder: Path, reused: int) -> None:
    """What launched our kernels, where tracebacks are, and how many rows an earlier run left."""
    for sentence in dict.fromkeys(told for record in records for told in what_ran(record)):
        tell(sentence)
    if any(record.status == "failed" for record in records):
        tell(f"tracebacks of what failed: {folder / FAILURES}")
    if reused:
        tell(
            f"{reused} of {len(records)} rows were already in {folder}; --fresh measures them again"
        )


def require_success(records: Sequence["Record"]) -> None:
    """Raises RunFailedError, whose sentence says what failed, if any did, or that no row has a figure:
    out of memory is a result beside rows that fit.
    """
    from stepgauge.report.names import describe

    failed = [record for record in records if record.status == "failed"]
    if failed and len(records) == 1:
        raise RunFailedError(f"{describe(failed[0])} failed: {failed[0].note}")
    if failed:
        raise RunFailedError(f"{len(failed)} of {len(records)} rows failed: {failed[0].note}")
    if records and all(record.status != "ok" and not record.metrics for record in records):
        raise RunFailedError(f"no row has a figure: {records[0].note}")
