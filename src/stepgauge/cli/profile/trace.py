"""`stepgauge profile trace`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_tables, progress, tell
from stepgauge.report.profile import overlap_table, ranks_table, tables

if TYPE_CHECKING:
    from stepgauge.spec.analysis import Analysis


def trace(
    *files: Annotated[
        Path, Parameter(help="Chrome traces of torch.profiler, plain or gzip, one a rank.")
    ],
    overlap: Annotated[
        bool,
        Parameter(
            help="Only the overlap of communication and computing; fails if there is none.",
            negative="",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        Parameter(help="Folder for report, analysis, speedscope JSON and collapsed stacks."),
    ] = None,
    format: Annotated[Format, Parameter(help="How the tables are printed.")] = "table",
) -> None:
    """Analyse traces that any PyTorch program wrote: kernels by kind, idle time, overlap, flame
    graph.

    Phases are the program's own ranges of the names forward, backward and optimizer; where it has
    none, what autograd runs is backward, Optimizer.step is optimizer, and the rest is forward. A
    file is read as a stream, so that large ones need little memory.
    """
    from stepgauge.bench import profile
    from stepgauge.trace.events import load
    from stepgauge.trace.overlap import required_overlap

    if not files:
        raise ValueError("FILE needs a value: the path of a trace")
    if overlap:
        print_tables(format, [overlap_table([required_overlap(load(file)) for file in files])])
        return
    names = profile.trace_names(files)
    found = _analyse(files)
    shown = [table for analysis in found[:1] for table in tables(analysis)]
    if len(found) > 1:
        shown = [
            ranks_table(found),
            *(table for table in shown if not table.caption.startswith("Overlap")),
        ]
        tell(
            f"the first table is of all {len(found)} traces, the others of {found[0].source}; --out has all"
        )
    if out:  # before anything is printed: a reader such as head may end the program
        for name, analysis in zip(names, found, strict=True):
            profile.write(analysis, out / name)
        tell(f"report: {profile.write_trace_report(dict(zip(names, found, strict=True)), out)}")
    print_tables(format, [table for table in shown if table.rows])


def _analyse(files: Sequence[Path]) -> "list[Analysis]":
    from stepgauge.trace.analysis import analyse

    found = []
    with progress(len(files), "traces") as (bar, task):
        for file in files:
            bar.update(task, description=file.name)
            found.append(analyse(file))
            bar.advance(task)
    return found
