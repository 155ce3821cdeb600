"""`stepgauge profile trace`: analyses traces that any PyTorch program wrote."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, info, print_tables, progress

if TYPE_CHECKING:
    from stepgauge.spec.analysis import AcrossRanks, Analysis


def trace(
    *files: Annotated[
        Path,
        Parameter(help="Chrome traces of torch.profiler, plain or gzip, one file per rank."),
    ],
    out: Annotated[
        Path | None,
        Parameter(help="Folder for the report and the analyses."),
    ] = None,
    format: Annotated[Format, Parameter(help="Output format.")] = "table",
) -> None:
    """Analyse traces of any PyTorch program: kernels by kind, idle time, overlap, flame graph and,
    for several ranks, which rank made the others wait.

    Phases are the program's own profiler ranges named forward, backward and optimizer. Without such
    ranges, work run by autograd is backward, Optimizer.step is optimizer, and the rest is forward.
    Files are read as streams, so that large ones need little memory.
    """
    from stepgauge.report.profile_page import trace_names, write, write_trace_report
    from stepgauge.trace.ranks import across

    if not files:
        raise ValueError("FILE needs a value: the path of a trace")
    names, analyses = trace_names(files), _analyse(files)
    shared = across(analyses) if len(analyses) > 1 else None
    if out:  # before printing, because a reader such as head may end the program
        by_name = dict(zip(names, analyses, strict=True))
        for name, analysis in by_name.items():
            write(analysis, out / name)
        info(f"report: {write_trace_report(by_name, out, shared)}")
    _print_analyses(analyses, shared, format)
    if not out:
        info("--out FOLDER also writes the analyses and a report with the flame graph")


def _print_analyses(
    analyses: "Sequence[Analysis]", shared: "AcrossRanks | None", format: Format
) -> None:
    """Prints the tables of a trace; of several, first those across ranks, then the first trace's."""
    from stepgauge.report.profile import answer, tables
    from stepgauge.report.profile_page import of_one_rank, ranks_tables
    from stepgauge.report.profile_ranks import sentences

    first = analyses[0]
    for analysis in analyses:
        for note in analysis.notes:
            info(f"{analysis.source}: {note}" if shared else note)
    shown = tables(first)
    if shared:
        shown = [*ranks_tables(analyses, shared), *of_one_rank(shown, first)]
        info(
            f"tables across all {len(analyses)} traces come first, then those of {first.source}; "
            f"--out FOLDER writes all tables"
        )
        for sentence in sentences(shared, analyses):
            info(sentence)
    else:
        info(answer(first))
    print_tables(shown, format)


def _analyse(files: Sequence[Path]) -> "list[Analysis]":
    from stepgauge.trace.analysis import analyse
    from stepgauge.trace.kinds import Kinds

    kinds = Kinds()  # a cache of kernel names, shared by all files
    analyses = []
    with progress(len(files), "traces") as (bar, task):
        for file in files:
            bar.update(task, description=file.name)
            analyses.append(analyse(file, kinds=kinds))
            bar.advance(task)
    return analyses
