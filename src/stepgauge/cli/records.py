"""`show`, `compare` and `report`: views of records that are already on disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_in, print_records, tell, warn
from stepgauge.report.compare import closest_differ_in, difference_table
from stepgauge.report.compare import compare as compare_records
from stepgauge.report.merge import merge_over as together
from stepgauge.report.views import STATISTICS
from stepgauge.spec.experiments import MACHINE_FILE
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore

Run = Annotated[Path, Parameter(help="Folder of a run.")]


def show(
    run: Run,
    /,
    *,
    format: Annotated[Format, Parameter(help="What to print.")] = "table",
    statistics: Annotated[
        tuple[str, ...],
        Parameter(
            help=f"Of each timing: {', '.join(STATISTICS)}. [median, and the step's range]",
        ),
    ] = (),
    kind: Annotated[
        str | None, Parameter(help="Only records of this kind: step, train, ...")
    ] = None,
    over: Annotated[
        str | None,
        Parameter(help="Rows that differ in this field alone, seed say, as one: mean and std."),
    ] = None,
) -> None:
    """Print a run's records."""
    unknown = set(statistics) - set(STATISTICS)
    if unknown:
        raise ValueError(f"statistics is {unknown.pop()!r}; choose from {', '.join(STATISTICS)}")
    records = [record for record in read(run) if kind in (None, record.kind)]
    if not records:
        raise ValueError(
            f"the run at {run} holds no records" + (f" of kind {kind}" if kind else "")
        )
    if over is not None:
        records = together(_with_figures(records), over.replace("-", "_"))
    print_records(records, format, statistics or (("mean", "std") if over else ()))


def _with_figures(records: Sequence[Record]) -> list[Record]:
    good = [record for record in records if record.status == "ok"]
    if not good:
        raise ValueError(f"none of the {len(records)} rows has figures: each failed or had no room")
    if left := len(records) - len(good):
        tell(f"{left} of {len(records)} rows have no figures and are left out")
    return good


def compare(
    first: Run,
    second: Run,
    /,
    *,
    ignoring: Annotated[
        tuple[str, ...],
        Parameter(
            help="Spec fields that may differ within a pair.",
        ),
    ] = (),
    format: Annotated[Format, Parameter(help="What to print.")] = "table",
) -> None:
    """Pair the rows of two runs that measured the same thing, and print the ratios.

    A difference is called one where the ranges from p10 to p90 do not meet.
    """
    compared = compare_records(
        read(first), read(second), ignoring=[name.replace("-", "_") for name in ignoring]
    )
    pairs = compared.differences
    if not pairs:
        raise ValueError(f"{first} and {second} share no row{_closest(first, second, ignoring)}")
    tell(f"A is {first}, B is {second}")
    for kind in dict.fromkeys(pair.first.kind for pair in pairs):
        print_in(format, difference_table([pair for pair in pairs if pair.first.kind == kind]))
    for sentence in compared.notes:
        tell(sentence)
    exceeding = sum(pair.exceeds_spread for pair in pairs)
    with_spread = sum(pair.has_spread for pair in pairs)
    tell(f"{exceeding} of {with_spread} figures differ by more than their spread")


def _closest(first: Path, second: Path, ignoring: Sequence[str]) -> str:
    """What keeps the closest rows of two runs apart, and the option that pairs them where one does."""
    sides = read(first), read(second)
    fields = closest_differ_in(*sides)
    if not fields:
        return ""
    ignored = list(dict.fromkeys([*ignoring, *fields]))
    try:
        compare_records(*sides, ignoring=ignored)
    except ValueError:  # rows of one run would be the same without these
        return f": the closest differ in {', '.join(fields)}"
    return f": the closest differ in {', '.join(fields)}; --ignoring {' '.join(ignored)} pairs them"


def report(
    run: Run,
    /,
    *,
    out: Annotated[Path | None, Parameter(help="The HTML file. [RUN/report.html]")] = None,
) -> None:
    """Write one HTML page of a run from its records.

    A study's page has a section an experiment, any other run's a section a kind of record.
    """
    records = read(run)
    if not records:
        raise ValueError(f"the run at {run} holds no records")
    print(_write_page(run, records, out or run / "report.html"))


def write_page(run: Path) -> None:
    """Writes the page of all of a run's records, and tells where it is."""
    page = _write_page(run, RunStore(run).read().latest(), run / "report.html")
    tell(f"report: {page}")


def _write_page(run: Path, records: Sequence[Record], path: Path) -> Path:
    """Of a study a section an experiment. Writing it loads no torch."""
    from stepgauge.report.run_page import run_page, write

    if not (run / MACHINE_FILE).exists():
        return write(run_page(records, run), path)

    from stepgauge.study.pages import page_of

    return write(page_of(run, records), path)


def read(run: Path) -> list[Record]:
    """The run's records, the last of each thing asked; damaged lines are named on standard error."""
    contents = RunStore(run).read()
    for problem in contents.problems:
        warn(problem)
    return contents.latest()
