"""`stepgauge study`: all experiments that this machine can run, and one report."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import tell
from stepgauge.cli.rows import Device, Fresh, Out, require_success, run_jobs
from stepgauge.spec import turns
from stepgauge.spec.experiments import EXPERIMENTS
from stepgauge.spec.store import RunStore
from stepgauge.spec.units import GIB


def study(
    *,
    out: Out = Path("runs/study"),
    only: Annotated[
        tuple[str, ...] | None,
        Parameter(
            help=f"Experiments: {', '.join(EXPERIMENTS)}. [all]",
        ),
    ] = None,
    device: Device = "auto",
    fresh: Fresh = False,
) -> None:
    """Run every experiment that this machine can run, and write one HTML report.

    Experiments that the machine cannot run are named in the report with the reason. Rows that its
    advice rests on are measured again at the end, in turns. Interrupted and started again, the study
    goes on where it stopped.
    """
    if only == ():
        raise ValueError("--only needs a value: the names of experiments")
    for name in only or ():
        if name not in EXPERIMENTS:
            raise ValueError(f"--only is {name!r}; choose from {', '.join(EXPERIMENTS)}")

    from stepgauge.report.run_page import write
    from stepgauge.study import notes, pages, run

    machine = run.this_machine(device)
    store = RunStore(out)
    experiments = run.select(only or ())
    store.prepare()
    notes.remember(machine, out)
    notes.remember_rows(run.select(()), machine, out)
    tell(f"{machine.name}, {machine.bytes / GIB:.0f} GiB")
    for experiment in experiments:
        if reason := experiment.needs(machine):
            tell(f"{experiment.name} is left out: {reason}")
    jobs = run.plan(machine, out, experiments)
    records = run_jobs(jobs, out, fresh=fresh)
    if again := run.unconfirmed(jobs, pages.measured_on(machine, store.read().latest())):
        tell(f"{len(again)} rows that advice may rest on are measured again, in turns")
        run_jobs(again, out, fresh=False, turns=turns.USUAL)
    page = pages.page_of(out, store.read().latest())
    print(f"report: {write(page, out / 'report.html')}")
    require_success(records)
