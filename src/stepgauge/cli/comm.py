"""`stepgauge comm ...`: collectives explained, and what was measured of them as a cost per byte."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.rule import Rule

from stepgauge.cli.console import Format, Output, print_in, print_table, tell
from stepgauge.cli.records import Run, read
from stepgauge.report.table import Table
from stepgauge.spec.explain import Explained, names_of
from stepgauge.spec.hardware import HardwareFile

app = App(name="comm", help="Explain collectives, and fit what bench comm measured.")


@app.command
def explain(
    op: Annotated[
        str, Parameter(help="A collective, or ring for the steps of a ring all-reduce.")
    ] = "all",
    /,
    *,
    ranks: Annotated[int, Parameter(help="Processes that take part.")] = 4,
) -> None:
    """Show what a collective does, on small tensors between real processes.

    Each rank before and after, and of a ring every step.
    """
    names_of(op, ranks=ranks)  # said before torch is loaded

    from stepgauge.bench.explain import explain as run_explained

    for explained in run_explained(op, ranks=ranks):
        _print(explained)


def _print(explained: Explained) -> None:
    console = Output(highlight=False)
    console.print(Rule(explained.op.replace("_", "-"), align="left"))
    print_table(_rank_table(explained))
    console.print()
    if explained.steps:
        print_table(_step_table(explained))
    if explained.remark:
        console.print(explained.remark)
    console.print()


def _rank_table(explained: Explained) -> Table:
    """Each rank's values before and after; a point where it has none, or none that are defined."""
    rows = [
        [f"rank {r}", " ".join(seen.before) or "·", " ".join(seen.after) or "·", seen.wait_ms]
        for r, seen in enumerate(explained.ranks)
    ]
    return Table(["", "before", "after", "ms inside"], rows, caption=explained.summary)


def _step_table(explained: Explained) -> Table:
    """Each rank's chunks after each step of a ring."""
    rows = []
    for step in explained.steps:
        for rank, chunks in enumerate(step.chunks):
            name = step.name if rank == 0 else ""
            rows.append([name, f"rank {rank}", step.sends[rank], *chunks])
    columns = ["step", "", "sends", *(f"chunk {c}" for c in range(len(explained.ranks)))]
    return Table(columns, rows, caption="Chunks after each step.")


@app.command
def fit(
    run: Run,
    /,
    *,
    hardware: Annotated[
        Path | None,
        Parameter(help="Hardware file that the fits are written to; made if it is not there."),
    ] = None,
    format: Annotated[Format, Parameter(help="What to print.")] = "table",
) -> None:
    """Fit time = α + β·bytes to a run of bench comm, and try it on sizes that it has not seen.

    Every third size is held out. Where one line does not fit there are several, each for a range of
    sizes.
    """
    from stepgauge.report.comm import fit_table, links

    records = [record for record in read(run) if record.kind == "comm"]
    found = links(records)
    if not found:
        raise ValueError(
            f"the run at {run} has no collective at three sizes or more; measure one with bench "
            "comm -b 1M -e 64M"
        )
    if hardware is not None:
        known = (
            HardwareFile.read(hardware) if hardware.exists() else HardwareFile(name=hardware.stem)
        )
        known.with_links(found).write(hardware)
        tell(f"{len(found)} links written to {hardware}")
    print_in(format, fit_table(found))
