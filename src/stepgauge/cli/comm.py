"""`stepgauge comm ...`: explains collectives, and fits a cost per byte to measured ones."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.rule import Rule

from stepgauge.cli.console import Format, Output, info, print_table
from stepgauge.cli.records import Run, read
from stepgauge.report.table import Table
from stepgauge.spec.explain import Explained, names_of
from stepgauge.spec.hardware import HardwareFile

app = App(name="comm", help="Explain collectives, and fit a cost per byte to bench comm's results.")


@app.command
def explain(
    op: Annotated[
        str,
        Parameter(help="A collective; ring for the steps of a ring all-reduce; or all of them."),
    ] = "all",
    /,
    *,
    ranks: Annotated[int, Parameter(help="Number of processes.")] = 4,
) -> None:
    """Show what a collective does, on small tensors between real processes.

    Prints each rank's values before and after, and for a ring all-reduce every step.
    """
    names_of(op, ranks=ranks)  # raises for a wrong value before torch is imported

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
    """Returns each rank's values before and after; a dot if it has none or they are undefined."""
    rows = [
        [f"rank {r}", " ".join(rank.before) or "·", " ".join(rank.after) or "·", rank.wait_ms]
        for r, rank in enumerate(explained.ranks)
    ]
    return Table(["", "before", "after", "ms inside"], rows, caption=explained.summary)


def _step_table(explained: Explained) -> Table:
    """Returns each rank's chunks after each step of a ring."""
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
        Parameter(help="Hardware file to write the fits to; created if it does not exist."),
    ] = None,
    format: Annotated[Format, Parameter(help="Output format.")] = "table",
) -> None:
    """Fit time = α + β·bytes to a run of bench comm, and test it on held-out sizes.

    Every third size is held out. If one line does not fit, several are used, each for a range of
    sizes.
    """
    from stepgauge.report.comm import fit_table, links

    records = [record for record in read(run) if record.kind == "comm"]
    fitted = links(records)
    if not fitted:
        raise ValueError(
            f"the run at {run} has no collective at three sizes or more; measure one with bench "
            "comm -b 1M -e 64M"
        )
    if hardware is not None:
        file = (
            HardwareFile.read(hardware) if hardware.exists() else HardwareFile(name=hardware.stem)
        )
        file.with_links(fitted).write(hardware)
        info(f"{len(fitted)} links written to {hardware}")
    print_table(fit_table(fitted), format)
