"""`stepgauge show`, `compare` and `report`: views of records that are already on disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, info, print_error, print_records, print_table, warn
from stepgauge.report.compare import closest_differ_in, difference_table
from stepgauge.report.compare import compare as compare_records
from stepgauge.report.merge import merge_over
from stepgauge.report.views import STATISTICS
from stepgauge.spec.experiments import MACHINE_FILE
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore, is_records_file

if TYPE_CHECKING:
    from stepgauge.report.page import Page

Run = Annotated[
    Path,
    Parameter(
        help="Folder of a run, or a file of records: .jsonl, or .json as --format json prints it."
    ),
]


def show(
    run: Run,
    /,
    *,
    format: Annotated[Format, Parameter(help="Output format.")] = "table",
    statistics: Annotated[
        tuple[str, ...],
        Parameter(
            help=f"Statistics of each timing: {', '.join(STATISTICS)}. [median, and the step's range]",
        ),
    ] = (),
    kind: Annotated[
        str | None, Parameter(help="Only records of this kind: step, train, ...")
    ] = None,
    over: Annotated[
        str | None,
        Parameter(
            help="Merge rows that differ only in this field, such as seed, and print mean and std."
        ),
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
        records = merge_over(_with_results(records), over.replace("-", "_"))
    print_records(records, format, statistics or (("mean", "std") if over else ()))


def _with_results(records: Sequence[Record]) -> list[Record]:
    ok = [record for record in records if record.status == "ok"]
    if not ok:
        raise ValueError(
            f"none of the {len(records)} rows has a result: each failed or ran out of memory"
        )
    if dropped := len(records) - len(ok):
        info(f"{dropped} of {len(records)} rows have no result and are left out")
    return ok


def compare(
    first: Run,
    second: Run,
    /,
    *,
    ignoring: Annotated[
        tuple[str, ...],
        Parameter(help="Fields that may differ between two rows of a pair."),
    ] = (),
    format: Annotated[Format, Parameter(help="Output format.")] = "table",
) -> None:
    """Pair the rows of two runs that measured the same thing, and print the ratios.

    Two figures are said to differ only if their ranges from p10 to p90 do not overlap.
    """
    compared = compare_records(
        read(first), read(second), ignoring=[name.replace("-", "_") for name in ignoring]
    )
    pairs = compared.differences
    if not pairs:
        raise ValueError(
            f"{first} and {second} share no row{_closest_rows(first, second, ignoring)}"
        )
    info(f"A is {first}, B is {second}")
    for kind in dict.fromkeys(pair.first.kind for pair in pairs):
        print_table(difference_table([pair for pair in pairs if pair.first.kind == kind]), format)
    for sentence in compared.notes:
        info(sentence)
    exceeding = sum(pair.exceeds_spread for pair in pairs)
    with_spread = sum(pair.has_spread for pair in pairs)
    info(f"{exceeding} of {with_spread} figures differ by more than their spread")


def _closest_rows(first: Path, second: Path, ignoring: Sequence[str]) -> str:
    """Returns a clause on the fields in which the closest rows differ, with the --ignoring option
    that pairs them if there is one; "" if no rows are close.
    """
    runs = read(first), read(second)
    fields = closest_differ_in(*runs)
    if not fields:
        return ""
    clause = f": the closest differ in {', '.join(fields)}"
    ignored = list(dict.fromkeys([*ignoring, *fields]))
    try:
        compare_records(*runs, ignoring=ignored)
    except ValueError:  # without these fields, rows within one run would be the same
        return clause
    return f"{clause}; --ignoring {' '.join(ignored)} pairs them"


def report(
    run: Run,
    /,
    *,
    out: Annotated[
        Path | None, Parameter(help="HTML file to write. [RUN/report.html; RUN.html for a file]")
    ] = None,
) -> int:
    """Write an HTML report of a run.

    The report of a study has a section for each experiment; that of any other run has a section for
    each kind of record.
    """
    records = read(run)
    if not records:
        raise ValueError(f"the run at {run} holds no records")
    path = run.with_suffix(".html") if is_records_file(run) else run / "report.html"
    page = _page_of(run, records)
    print(page.write(out or path))
    return print_problems(page)


def write_page(run: Path) -> None:
    """Writes the run's report.html and prints its path."""
    page = _page_of(run, RunStore(run).read().latest())
    info(f"report: {page.write(run / 'report.html')}")
    print_problems(page)


def _page_of(run: Path, records: Sequence[Record]) -> "Page":
    """Returns the page of a study or of any other run, without torch."""
    from stepgauge.report.run_page import run_page

    if not (run / MACHINE_FILE).exists():
        return run_page(records, run)

    from stepgauge.study.pages import page_of

    return page_of(run, records)


def print_problems(page: "Page") -> int:
    """Prints which sections cannot be drawn, and returns the exit status."""
    problems = [section.problem for section in page.sections if section.problem]
    return max((print_error(problem, 1) for problem in problems), default=0)


def read(run: Path) -> list[Record]:
    """Returns the run's records, the latest for each spec. Warns about damaged lines."""
    contents = RunStore(run).read()
    for problem in contents.problems:
        warn(problem)
    return contents.latest()
