"""`stepgauge profile trace`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_tables, progress, tell

if TYPE_CHECKING:
    from stepgauge.spec.analysis import Analysis

As = Annotated[Format, Parameter(help="How the tables are printed.")]


def trace(
    *files: Annotated[
        Path, Parameter(help="Chrome traces of torch.profiler, plain or gzip, one a rank.")
    ],
    out: Annotated[
        Path | None,
        Parameter(help="Folder for the report and the analyses."),
    ] = None,
    format: As = "table",
) -> None:
    """Analyse traces that any PyTorch program wrote: kernels by kind, idle time, overlap, flame
    graph; of several ranks, who made the others wait.

    Phases are the program's own ranges of the names forward, backward and optimizer; where it has
    none, what autograd runs is backward, Optimizer.step is optimizer, and the rest is forward. A
    file is read as a stream, so that large ones need little memory.
    """
    from stepgauge.report.profile_page import trace_names, write, write_trace_report
    from stepgauge.trace.ranks import across

    if not files:
        raise ValueError("FILE needs a value: the path of a trace")
    names, found = trace_names(files), _analyse(files)
    shared = across(found) if len(found) > 1 else None
    if out:  # before anything is printed: a reader such as head may end the program
        for name, analysis in zip(names, found, strict=True):
            write(analysis, out / name)
        tell(f"report: {write_trace_report(dict(zip(names, found, strict=True)), out, shared)}")
    _print(found, shared, format)
    if not out:
        tell("--out FOLDER writes the report with the flame graph, and the analyses, too")


def _print(found: "Sequence[Analysis]", shared: object, format: Format) -> None:
    from stepgauge.report.profile import answer, tables
    from stepgauge.report.profile_page import of_one_rank, ranks_tables
    from stepgauge.report.profile_ranks import sentences
    from stepgauge.spec.analysis import AcrossRanks

    for one in found:
        for note in one.notes:
            tell(f"{one.source}: {note}" if len(found) > 1 else note)
    shown = tables(found[0])
    if isinstance(shared, AcrossRanks):
        together = ranks_tables(found, shared)
        shown = [*together, *of_one_rank(shown, found[0])]
        tell(
            f"what is of all {len(found)} traces comes first, then what is of {found[0].source} "
            f"alone; --out has all"
        )
        for sentence in sentences(shared, found):
            tell(sentence)
    else:
        tell(answer(found[0]))
    print_tables(format, shown)


def _analyse(files: Sequence[Path]) -> "list[Analysis]":
    from stepgauge.trace.analysis import analyse
    from stepgauge.trace.kinds import Kinds

    kinds = Kinds()  # remembers names over all files
    found = []
    with progress(len(files), "traces") as (bar, task):
        for file in files:
            bar.update(task, description=file.name)
            found.append(analyse(file, kinds=kinds))
            bar.advance(task)
    return found
