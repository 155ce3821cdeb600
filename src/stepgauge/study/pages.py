"""Builds the HTML page of a study, with one section per experiment."""

import contextlib
import dataclasses
import traceback
from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.facts import page_facts
from stepgauge.report.findings import findings
from stepgauge.report.kernels import kernel_table
from stepgauge.report.kinds import answer
from stepgauge.report.page import Block, OtherMachine, Page, Section, Text
from stepgauge.report.run_page import run_page, warnings
from stepgauge.report.views import record_table
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.record import Record
from stepgauge.spec.store import FAILURES
from stepgauge.study import EXPERIMENTS
from stepgauge.study.experiment import Experiment, StudyMachine, shipped
from stepgauge.study.notes import read_machine, read_rows, row_id


def page_of(folder: Path, records: Sequence[Record]) -> Page:
    """Returns the page of a study if the run has a machine file, else that of an ordinary run."""
    machine = read_machine(folder)
    return study_page(records, machine, folder) if machine else run_page(records, folder)


def study_page(records: Sequence[Record], machine: StudyMachine, folder: Path) -> Page:
    measured = measured_on(machine, records)
    return Page(
        title="stepgauge study",
        sections=[_section(experiment, machine, folder, measured) for experiment in EXPERIMENTS],
        facts=page_facts(measured),
        findings=findings(measured),
    )


def measured_on(machine: StudyMachine, records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.environment.get("device") == machine.name]


def _section(
    experiment: Experiment, machine: StudyMachine, folder: Path, records: Sequence[Record]
) -> Section:
    """Returns the experiment's section: its measurements, or why it did not run. On a CPU, results of a
    GPU machine that come with the package follow.
    """
    empty = Section(experiment.title, experiment.question, method=experiment.method)
    gpu_results = [] if machine.is_gpu else _gpu_results(experiment)
    reason = experiment.needs(machine)
    if reason and gpu_results:
        return dataclasses.replace(empty, blocks=[Text(f"Not run here: {reason}."), *gpu_results])
    if reason:
        return dataclasses.replace(empty, reason=reason)
    own = _own(experiment, machine, folder, records)
    if not own:
        return dataclasses.replace(empty, reason="not measured in this run")
    on_cpu = [Text(f"On a CPU, {experiment.on_cpu}.")] if experiment.on_cpu and gpu_results else []
    try:
        blocks = [*on_cpu, *warnings(own), *experiment.blocks(own),
                  *experiment.pictures(own, folder), *gpu_results]  # fmt: skip
        good = [record for record in own if record.status == "ok"]
        return dataclasses.replace(
            empty, blocks=blocks, answer=experiment.answer(good) if good else answer([])
        )
    except Exception as error:  # the other sections are still written
        with contextlib.suppress(OSError), (folder / FAILURES).open("a") as log:
            log.write(f"section of {experiment.name}\n{traceback.format_exc()}\n")
        why = f"cannot be drawn: {type(error).__name__}: {error}; traceback in {folder / FAILURES}"
        problem = f"the section of {experiment.name} {why}"
        return dataclasses.replace(empty, reason=f"its section {why}", problem=problem)


def _own(
    experiment: Experiment, machine: StudyMachine, folder: Path, records: Sequence[Record]
) -> list[Record]:
    """Returns the experiment's records in its order. Row ids come from the run's file; an older run
    without one takes them from the experiment's jobs, which imports torch.
    """
    ids = read_rows(folder)
    if ids:
        rows = ids.get(experiment.name, [])
    else:
        rows = [row_id(job.pending) for job in experiment.jobs(machine, folder)]
    by_id = {row_id(record): record for record in records}
    return [by_id[row] for row in rows if row in by_id]


def _gpu_results(experiment: Experiment) -> list[Block]:
    """Returns the results of a GPU machine that come with the package."""
    records = shipped(experiment.name)
    if not records:
        return []
    environment = records[0].environment
    title = (
        f"Not this machine: measured on {environment['device']} with torch {environment['torch']} on "
        f"{records[0].created[:10]}; the records come with stepgauge"
    )
    return [OtherMachine(title, experiment.answer(records), [_table(records)])]


def _table(records: Sequence[Record]) -> Block:
    table = (kernel_table if records[0].kind in KERNELS else record_table)(records)
    return dataclasses.replace(table, caption=f"All rows. {table.caption}", folded=True)
