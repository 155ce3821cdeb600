"""`stepgauge comm ...`: collectives explained, and what was measured of them as a cost per byte."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.rule import Rule

from stepgauge.cli.console import Format, Output, print_table, print_tables, tell
from stepgauge.cli.records import Run, read
from stepgauge.spec.explain import Explained, names_of
from stepgauge.spec.hardware import HardwareFile

app = App(name="comm", help="Explain collectives, and fit what bench comm measured.")

MOST_ARROWS = 8  # that are drawn; more are a table


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

    Each rank before and after, and who sends what.
    """
    names_of(op, ranks=ranks)  # said before torch is loaded

    from stepgauge.bench.explain import explain as run_explained

    for explained in run_explained(op, ranks=ranks):
        _print(explained)


def _print(explained: Explained) -> None:
    from stepgauge.report.explained import rank_table, step_table, traffic_table

    console = Output(highlight=False)
    console.print(Rule(explained.op.replace("_", "-"), align="left"))
    print_table(rank_table(explained))
    console.print()
    if explained.steps:
        print_table(step_table(explained))
    elif len(explained.arrows) <= MOST_ARROWS:
        for each in explained.arrows:
            arrow = f"──[bold]{each.what}[/bold]──▶"
            console.print(f"  rank {each.source} {arrow} rank {each.target}")
    else:
        print_table(traffic_table(explained))
    if explained.remark:
        console.print(explained.remark)
    console.print()


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
    from stepgauge.report.comm import fit_table, links, prediction_table

    records = [record for record in read(run) if record.kind == "comm"]
    found = links(records)
    if not found:
        raise ValueError(
            f"the run at {run} has no collective at three sizes or more; measure one with bench comm -b 1M -e 64M"
        )
    if hardware is not None:
        known = (
            HardwareFile.read(hardware) if hardware.exists() else HardwareFile(name=hardware.stem)
        )
        known.with_links(found).write(hardware)
        tell(f"{len(found)} links written to {hardware}")
    print_tables(format, [fit_table(found), prediction_table(found, records)])
