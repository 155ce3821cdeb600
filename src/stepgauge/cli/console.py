"""Output to the user: tables on standard output; progress, notes and errors on standard error."""

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
)
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from stepgauge.cli.fitting import column_widths, columns_that_fit, heading_lines, remark_lines
from stepgauge.cli.option_names import with_option_names
from stepgauge.cli.pace import TimeLeft
from stepgauge.cli.row_name import Description
from stepgauge.report.numbers import heading, number
from stepgauge.report.table import REMARK, Table, objects

if TYPE_CHECKING:
    from stepgauge.cost.planning.planner import Hear
    from stepgauge.spec.record import Record

# Metrics of a row's one-line summary, next to all times; of a row without times, its memory.
SUMMARY_METRICS = (
    *("samples_per_s", "tokens_per_s", "first_loss", "last_loss"),
    *("busbw_gb_per_s", "gb_per_s", "wrong"),
)
MEMORY_METRICS = ("peak_bytes", "saved_for_backward_bytes")
# A profile has a time for each phase and kind of kernel; its tables show them.
SUMMARY_OF_KIND = {"profile": ("step_ms", "profiled_step_ms", "idle_ms")}
UNLIMITED_WIDTH = 10_000
Format = Literal["table", "csv", "markdown", "latex", "json"]


def _requested_width() -> int:
    """Returns COLUMNS of the environment; 0 if it is no width."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else 0


# Before the first console: with COLUMNS=0, rich would print nothing, not even error messages, and with
# "²", which str.isdigit accepts, it would raise ValueError.
if not _requested_width():
    os.environ.pop("COLUMNS", None)


class Output(Console):
    """Standard output. Raises BrokenPipeError if the reader has closed the pipe, where rich itself
    would exit with status 1.
    """

    def __init__(self, **settings: Any):
        # rich would replace ":0" and the like in names such as cuda:0 by emoji.
        super().__init__(**{"emoji": False, **settings})

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the BrokenPipeError


error_console = Console(stderr=True, highlight=False, emoji=False)


def print_error(message: str, status: int) -> int:
    """Prints an error message and returns the exit status."""
    # Not error_console, which print_errors_only silences.
    Console(stderr=True, highlight=False, emoji=False).print(
        f"stepgauge: {with_option_names(message)}", style="red", markup=False, soft_wrap=True
    )
    return status


def warn(message: str) -> None:
    """Prints a warning on standard error."""
    error_console.print(
        f"stepgauge: {with_option_names(message)}", style="yellow", markup=False, soft_wrap=True
    )


def info(message: str) -> None:
    """Prints a note on standard error."""
    error_console.print(with_option_names(message), markup=False, soft_wrap=True)


def write_file(text: str, path: Path, noun: str) -> None:
    """Writes the file and prints where it is."""
    path.write_text(text, encoding="utf-8")
    info(f"{noun}: {path}")


def print_points(head: str, points: Iterable[str]) -> None:
    """Prints a heading with indented sentences below it. They wrap in a terminal; in a file each is
    one line.
    """
    console = Output(highlight=False)
    width = console.width if console.is_terminal else UNLIMITED_WIDTH
    lines = [
        textwrap.fill(
            point, max(width, 20), initial_indent="  ", subsequent_indent="    ",
            break_long_words=False, break_on_hyphens=False,
        )
        for point in points
    ]  # fmt: skip
    print(f"\n{head}", *lines, sep="\n")


def print_table(table: Table, format: Format = "table", *, complete: str = "csv or json") -> None:
    """Prints a table on standard output in a format.

    As a "table" it has the columns that fit `table_width`. Below it stand its notes, remarks for
    which there is no column, and the names of the columns left out, which the formats `complete` print.
    """
    if format != "table":
        print(table.to(format), end="")
        return
    console = Output(highlight=False)
    one_line = not console.is_terminal  # another program reads a sentence as one line
    if table.caption:  # printed here, because rich wraps a title at the width of its table
        console.print(table.caption, style="table.title", markup=False, soft_wrap=one_line)
    if not table.rows:
        return
    every = table.for_display()
    width = table_width(console)
    shown = columns_that_fit(every, width)
    if shown is None:
        _print_cell_lines(every)
    elif shown.columns:
        _print_columns(shown, column_widths(shown, width))
    rest = [name for name in every.columns if shown and name not in shown.columns]
    below = [*(remark_lines(every) if REMARK in rest else ()), *every.notes]
    for sentence in below:
        console.print(sentence, markup=False, soft_wrap=one_line)
    if more := [name for name in rest if name != REMARK]:
        left_out = f"--format {complete} has more: {', '.join(more)}"
        console.print(left_out, style="dim", markup=False, soft_wrap=one_line)


def table_width(console: Console) -> int:
    """Returns the width of the terminal. Output to a file or a program is as wide as COLUMNS says, or
    without it so wide that tables have all columns.
    """
    return console.width if console.is_terminal else _requested_width() or UNLIMITED_WIDTH


def _print_columns(table: Table, widths: Sequence[int]) -> None:
    """Prints the table in columns of these widths."""
    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    for column, width in zip(table.columns, widths, strict=True):
        numeric = table.is_numeric(column)
        drawn.add_column(
            Text("\n".join(heading_lines(table, column))),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
            width=width,
        )
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    console = Output(highlight=False, width=UNLIMITED_WIDTH)
    console.width = console.measure(drawn).maximum
    with console.capture() as printed:
        console.print(drawn)
    for line in printed.get().splitlines():
        print(line.rstrip())  # rich fills all rows up to the same width


def _print_cell_lines(table: Table) -> None:
    """Prints each cell on its own line, for a width in which not even two columns fit."""
    names = table.name_columns()
    for row in table.rows:
        print(" ".join(row[place] for place in names))
        for place in range(names.stop, len(row)):
            if row[place]:
                print(f"  {table.columns[place]}: {row[place]}")


def print_records(
    records: Sequence["Record"], format: Format, statistics: Sequence[str] = ()
) -> None:
    """Prints a table for each kind of record; as JSON, one list of the records themselves.

    statistics  columns of each timing, such as median and p90; empty: the format's default
    """
    if format == "json":
        print("[" + ",\n".join(record.to_json() for record in records) + "]")
        return
    from stepgauge.report.kinds import kind_of  # slow to import: tables and plots of all kinds

    for name in dict.fromkeys(record.kind for record in records):
        kind, of_kind = kind_of(name), [record for record in records if record.kind == name]
        columns = statistics or (kind.csv_statistics if format == "csv" else ())
        print_table(kind.table(of_kind, statistics=columns), format)


def print_tables(tables: Sequence[Table], format: Format) -> None:
    """Prints tables with an empty line after each; as JSON, one list of captions and rows."""
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
            print_table(table, format)
            print()


def print_errors_only() -> None:
    """Silences everything but error messages, for ranks other than 0."""
    error_console.quiet = True
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends


def has_bars() -> bool:
    """Returns True if standard error is a terminal that can redraw a bar, which TERM=dumb cannot."""
    return error_console.is_terminal and not error_console.is_dumb_terminal


@contextlib.contextmanager
def progress(total: int | None, noun: str) -> Iterator[tuple[Progress, Any]]:
    """Shows a progress bar on standard error: what is running, the count and the time left.

    total  None if it is not known yet: the bar appears with the update that makes it visible
    """
    whole = Column(no_wrap=True)
    shortened = Column(ratio=1, no_wrap=True)
    bar = Progress(
        Description(table_column=shortened),
        BarColumn(bar_width=10),
        MofNCompleteColumn(table_column=whole),
        TextColumn(f"{noun},", table_column=whole),
        TimeLeft(table_column=whole),
        TextColumn("left,", table_column=whole),
        TimeElapsedColumn(table_column=whole),
        TextColumn("elapsed", table_column=whole),
        console=error_console,
        transient=True,
        disable=not has_bars(),  # in a file it would leave an empty line
        expand=True,  # so that a long description is shortened and not the figures
    )
    with bar:
        yield bar, bar.add_task("", total=total, visible=total is not None)


@contextlib.contextmanager
def progress_heard(noun: str) -> Iterator["Hear"]:
    """Yields a function that shows what is done, how many things (a `noun` such as "layout") it is done
    with, and how many there are: in a bar, or without a bar in a line when something begins.
    """
    with progress(None, f"{noun}s") as (bar, task):

        def hear(doing: str, done: int, total: int) -> None:
            bar.update(task, description=doing, completed=done, total=total, visible=True)
            if not done and not has_bars():
                info(f"{doing} {counted(total, noun)}")

        yield hear


def counted(count: int, noun: str) -> str:
    """Returns "1 shape", or "2 shapes"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def summary(record: "Record", name: str) -> str:
    """Returns one line with the main figures of a record; `name` is the row's label."""
    predicted = "predicted " if record.provenance == "modelled" else ""
    if record.status != "ok":
        status = "not predicted" if predicted else record.status.upper()
        return f"{name}: {status}, {record.note}"
    of_kind = SUMMARY_OF_KIND.get(record.kind)
    shown = [n for n in of_kind or () if n in record.metrics]
    shown = shown or [n for n in record.metrics if n.endswith("_ms") or n in SUMMARY_METRICS]
    shown = shown or [n for n in MEMORY_METRICS if n in record.metrics]

    from stepgauge.report.views import is_measurable

    figures = [
        f"{predicted}{heading(n, record.metrics[n].unit)} "
        f"{number(record.median(n), record.metrics[n].unit)}"
        for n in shown
        if is_measurable(record, n)
    ]
    if "shapes" in record.metrics:
        figures.append(counted(round(record.metrics["shapes"].median), "shape"))
    return f"{name}: {', '.join(figures) or 'ok'}"
