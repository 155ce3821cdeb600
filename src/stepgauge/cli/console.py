"""What people see: tables on standard output, progress and complaints on standard error."""

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

from stepgauge.cli.fitting import column_widths, lines_of, remarks_below, that_fit
from stepgauge.cli.option_names import in_options
from stepgauge.report.numbers import heading, number
from stepgauge.report.table import REMARK, Table, objects

if TYPE_CHECKING:
    from stepgauge.spec.record import Record

SUMMED_UP = ("tokens_per_s", "first_loss", "last_loss", "busbw_gb_per_s", "gb_per_s", "wrong")
MEMORY = ("peak_bytes", "saved_for_backward_bytes")  # where nothing was timed
NO_BOUND = 10_000
PAGE_WIDTH = 100  # where neither a terminal nor COLUMNS says another
Format = Literal["table", "csv", "markdown", "latex", "json"]


class Output(Console):
    """Standard output. That its reader has gone is for the caller to handle; rich itself would exit
    with status 1.
    """

    def __init__(self, **settings: Any):
        # Names may have colons: cuda:0 is no emoji.
        super().__init__(**{"emoji": False, **settings})

    def on_broken_pipe(self) -> None:
        raise  # the error that is being handled where this is called


error_console = Console(stderr=True, highlight=False, emoji=False)


def complain(message: str, status: int) -> int:
    """Prints the sentence and returns the exit status."""
    Console(stderr=True, highlight=False, emoji=False).print(
        f"stepgauge: {in_options(message)}", style="red", markup=False, soft_wrap=True
    )
    return status


def warn(message: str) -> None:
    error_console.print(
        f"stepgauge: {in_options(message)}", style="yellow", markup=False, soft_wrap=True
    )


def tell(message: str) -> None:
    error_console.print(in_options(message), markup=False, soft_wrap=True)


def write(text: str, path: Path, what: str) -> None:
    """Writes a file, and tells the user what is where."""
    path.write_text(text, encoding="utf-8")
    tell(f"{what}: {path}")


def print_points(head: str, points: Iterable[str]) -> None:
    """A heading, and sentences below it: in a terminal they wrap behind their indent, in a file each
    is one line.
    """
    console = Output(highlight=False)
    width = console.width if console.is_terminal else NO_BOUND
    lines = [
        textwrap.fill(
            point, max(width, 20), initial_indent="  ", subsequent_indent="    ",
            break_long_words=False, break_on_hyphens=False,
        )
        for point in points
    ]  # fmt: skip
    print(f"\n{head}", *lines, sep="\n")


def print_table(table: Table) -> None:
    """A table for the eyes: of one that is wider than the terminal, or a page where there is none,
    the columns that fit, what has no column below it, and a line on the rest.
    """
    console = Output(highlight=False)
    whole = not console.is_terminal  # another program reads a sentence as one line
    if table.caption:  # not the table's title, which would wrap at the width of a narrow one
        console.print(table.caption, style="table.title", markup=False, soft_wrap=whole)
    if not table.rows:
        return
    every = table.for_display()
    width = console.width if console.is_terminal else _page_width()
    shown = that_fit(every, width)
    if shown is None:
        _draw_down(every)
    elif shown.columns:
        _draw(shown, column_widths(shown, width, may_fold=console.is_terminal))
    rest = [name for name in every.columns if shown and name not in shown.columns]
    below = [*(remarks_below(every) if REMARK in rest else ()), *every.notes]
    for sentence in below:
        console.print(sentence, markup=False, soft_wrap=whole)
    if more := [name for name in rest if name != REMARK]:
        left_out = f"--format csv or json has more: {', '.join(more)}"
        console.print(left_out, style="dim", markup=False, soft_wrap=whole)


def _page_width() -> int:
    """Of what is no terminal."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) else PAGE_WIDTH


def _draw(table: Table, widths: Sequence[int]) -> None:
    """In columns of these widths."""
    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    for column, width in zip(table.columns, widths, strict=True):
        numeric = table.is_numeric(column)
        drawn.add_column(
            Text("\n".join(lines_of(table, column))),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
            width=width,
        )
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    console = Output(highlight=False, width=NO_BOUND)
    console.width = console.measure(drawn).maximum
    console.print(drawn)


def _draw_down(table: Table) -> None:
    """A line a cell: where not even two columns fit beside each other."""
    names = table.name_columns()
    for row in table.rows:
        print(" ".join(row[place] for place in names))
        for place in range(names.stop, len(row)):
            if row[place]:
                print(f"  {table.columns[place]}: {row[place]}")


def print_records(
    records: Sequence["Record"], format: Format, statistics: Sequence[str] = ()
) -> None:
    if format == "json":
        print("[" + ",\n".join(record.to_json() for record in records) + "]")
        return
    if format == "csv" and not statistics:
        statistics = ("median", "p10", "p90", "mean", "std", "n")
    from stepgauge.report.kinds import table_of  # all tables of all kinds, and their plots

    for kind in dict.fromkeys(record.kind for record in records):
        print_in(
            format, table_of(kind)([r for r in records if r.kind == kind], statistics=statistics)
        )


def print_in(format: Format, table: Table) -> None:
    if format == "table":
        print_table(table)
    else:
        print(table.to(format), end="")


def print_tables(format: Format, tables: Sequence[Table]) -> None:
    """Several tables, an empty line after each; as JSON one document, a list of captions with their
    rows.
    """
    if format == "json":
        print(
            json.dumps(
                [{"caption": t.caption, "rows": objects(t)} for t in tables],
                indent=1,
                ensure_ascii=False,
            )
        )
        return
    for table in tables:
        if table.rows or table.caption:
            print_in(format, table)
            print()


def print_errors_only() -> None:
    """From now on only complaints are printed: another process speaks for all."""
    error_console.quiet = True
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends


@contextlib.contextmanager
def progress(total: int, noun: str) -> Iterator[tuple[Progress, Any]]:
    """A bar on standard error: what runs now, how many of how many, how long."""
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(noun),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=error_console,
        transient=True,
        disable=not error_console.is_terminal,  # a file would get an empty line of it
    )
    with bar:
        yield bar, bar.add_task("", total=total)


def summary(record: "Record", name: str) -> str:
    """One line for a record that was just made, of what was run in words."""
    predicted = "predicted " if record.provenance == "modelled" else ""
    if record.status != "ok":
        not_predicted = "not predicted" if predicted else record.status.upper()
        return f"{name}: {not_predicted}, {record.note}"
    shown = [n for n in record.metrics if n.endswith("_ms") or n in SUMMED_UP]
    shown = shown or [name for name in MEMORY if name in record.metrics]

    from stepgauge.report.views import is_measurable

    shown = [name for name in shown if is_measurable(record, name)]
    figures = [
        f"{predicted}{heading(n, record.metrics[n].unit)} "
        f"{number(record.median(n), record.metrics[n].unit)}"
        for n in shown
    ]
    if "shapes" in record.metrics:
        figures.append(f"{record.metrics['shapes'].median:.0f} shapes")
    return f"{name}: {', '.join(figures) or 'ok'}"
