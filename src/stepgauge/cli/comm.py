"""`stepgauge comm ...`: collectives explained, and what was measured of them as a cost per byte."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from stepgauge.cli.console import Format, print_tables, tell, write
from stepgauge.cli.records import Run, read
from stepgauge.spec.explain import names_of
from stepgauge.spec.hardware import HardwareFile

app = App(name="comm", help="Explain collectives, and fit what bench comm measured.")

WritePage = Annotated[Path | None, Parameter(help="An HTML file with the pictures, too.")]


@app.command
def explain(
    op: Annotated[
        str, Parameter(help="A collective, or ring for the steps of a ring all-reduce.")
    ] = "all",
    /,
    *,
    ranks: Annotated[int, Parameter(help="Processes that take part.")] = 4,
    report: WritePage = None,
) -> None:
    """Show what a collective does, on small tensors between real processes.

    Each rank before and after, and who sends what.
    """
    names_of(op, ranks=ranks)  # said before torch is loaded

    from stepgauge.bench.explain import explain as run_explained
    from stepgauge.cli.explained import print_explained
    from stepgauge.report.explained import explained_page

    found = run_explained(op, ranks=ranks)
    for explained in found:
        print_explained(explained)
    if report is not None:
        write(explained_page(found), report, "pictures")


@app.command
def fit(
    run: Run,
    /,
    *,
    hardware: Annotated[
        Path | None,
        Parameter(help="Hardware file that the fits are written to; made if it is not there."),
    ] = None,
    report: WritePage = None,
    format: Annotated[Format, Parameter(help="What to print.")] = "table",
) -> None:
    """Fit time = α + β·bytes to a run of bench comm, and try it on sizes that it has not seen.

    Every third size is held out. Where one line does not fit there are several, each for a range of
    sizes.
    """
    from stepgauge.report.comm import comm_page, fit_table, links, prediction_table

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
    if report is not None:
        write(comm_page(records), report, "plots")
    print_tables(format, [fit_table(found), prediction_table(found, records)])
