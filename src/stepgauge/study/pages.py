"""Records of a study in, one HTML page out, a section an experiment."""

import contextlib
import dataclasses
import traceback
from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.answers import answer
from stepgauge.report.facts import page_facts
from stepgauge.report.findings import findings
from stepgauge.report.kernels import kernel_table
from stepgauge.report.page import Block, OtherMachine, Page, Section, Text
from stepgauge.report.run_page import run_page, warnings
from stepgauge.report.views import record_table
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.record import Record
from stepgauge.spec.store import FAILURES
from stepgauge.study import EXPERIMENTS
from stepgauge.study.experiment import Experiment, StudyMachine, shipped
from stepgauge.study.notes import remembered, remembered_rows, row_of


def page_of(folder: Path, records: Sequence[Record]) -> Page:
    """Of a study, where its machine was noted beside the records; else as of any other run."""
    machine = remembered(folder)
    return study_page(records, machine, folder) if machine else run_page(records, folder)


def study_page(records: Sequence[Record], machine: StudyMachine, folder: Path) -> Page:
    here = measured_on(machine, records)
    return Page(
        title="stepgauge study",
        sections=[_experiment(experiment, machine, folder, here) for experiment in EXPERIMENTS],
        facts=page_facts(here),
        findings=findings(here),
    )


def measured_on(machine: StudyMachine, records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.environment.get("device") == machine.name]


def _experiment(
    experiment: Experiment, machine: StudyMachine, folder: Path, records: Sequence[Record]
) -> Section:
    """The experiment's section: what was measured here, else the reason and what a GPU gave."""
    empty = Section(experiment.title, experiment.question, method=experiment.method)
    elsewhere = [] if machine.is_gpu else _elsewhere(experiment)
    reason = experiment.needs(machine)
    if reason and elsewhere:
        return dataclasses.replace(empty, blocks=[Text(f"Not run here: {reason}."), *elsewhere])
    if reason:
        return dataclasses.replace(empty, reason=reason)
    own = _own(experiment, machine, folder, records)
    if not own:
        return dataclasses.replace(empty, reason="not measured in this run")
    caution = [Text(f"On a CPU: {experiment.on_cpu}.")] if experiment.on_cpu and elsewhere else []
    try:
        blocks = [*caution, *warnings(own), *experiment.blocks(own),
                  *experiment.pictures(own, folder), *elsewhere]  # fmt: skip
        good = [record for record in own if record.status == "ok"]
        return dataclasses.replace(
            empty, blocks=blocks, answer=experiment.answer(good) if good else answer([])
        )
    except Exception as error:  # one section that cannot be drawn must not cost the others
        with contextlib.suppress(OSError), (folder / FAILURES).open("a") as log:
            log.write(f"section of {experiment.name}\n{traceback.format_exc()}\n")
        why = f"{type(error).__name__}: {error}; traceback in {folder / FAILURES}"
        return dataclasses.replace(empty, reason=f"its section cannot be drawn: {why}")


def _own(
    experiment: Experiment, machine: StudyMachine, folder: Path, records: Sequence[Record]
) -> list[Record]:
    """The experiment's records in its order: by the run's note of its rows, else, of a run that has
    none, by asking the experiment again, which loads torch.
    """
    noted = remembered_rows(folder)
    if noted:
        rows = noted.get(experiment.name, [])
    else:
        rows = [row_of(job.asked) for job in experiment.jobs(machine, folder)]
    by_row = {row_of(record): record for record in records}
    return [by_row[row] for row in rows if row in by_row]


def _elsewhere(experiment: Experiment) -> list[Block]:
    """What a GPU machine gave, from the records that come with the package."""
    records = shipped(experiment.name)
    if not records:
        return []
    where = records[0].environment
    title = (
        f"Not this machine: {where['device']}, torch {where['torch']}, "
        f"{records[0].created[:10]}, a record that comes with stepgauge"
    )
    return [OtherMachine(title, experiment.answer(records), [_table(records)])]


def _table(records: Sequence[Record]) -> Block:
    table = (kernel_table if records[0].kind in KERNELS else record_table)(records)
    return dataclasses.replace(table, caption=f"All rows. {table.caption}", folded=True)
