"""`stepgauge study`: runs all experiments that this machine can run, and writes one report."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import info
from stepgauge.cli.records import print_problems
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
        Parameter(help=f"Experiments to run: {', '.join(EXPERIMENTS)}. [default: all]"),
    ] = None,
    device: Device = "auto",
    fresh: Fresh = False,
) -> int:
    """Run all experiments that this machine can run, and write one HTML report.

    The report also lists the other experiments, with the reason why they cannot run here. Rows that
    the report's advice is based on are measured again at the end, one round after another. If the
    study is interrupted, rerun the command to continue.
    """
    if only == ():
        raise ValueError("--only needs a value: the names of experiments")
    for name in only or ():
        if name not in EXPERIMENTS:
            raise ValueError(f"--only is {name!r}; choose from {', '.join(EXPERIMENTS)}")

    from stepgauge.study import notes, pages, run

    machine = run.this_machine(device)
    store = RunStore(out)
    experiments = run.select(only or ())
    store.prepare()
    notes.write_machine(machine, out)
    notes.write_rows(run.select(()), machine, out)
    info(f"{machine.name}, {machine.bytes / GIB:.0f} GiB")
    for experiment in experiments:
        if reason := experiment.needs(machine):
            info(f"skipping {experiment.name}: {reason}")
    jobs = run.plan(machine, out, experiments)
    records = run_jobs(jobs, out, fresh=fresh)
    if again := run.unconfirmed(jobs, pages.measured_on(machine, store.read().latest())):
        info(f"measuring {len(again)} rows that advice may be based on again, in several rounds")
        run_jobs(again, out, fresh=False, turns=turns.DEFAULT_TURNS)
    page = pages.page_of(out, store.read().latest())
    print(f"report: {page.write(out / 'report.html')}")
    status = print_problems(page)
    require_success(records)
    return status
