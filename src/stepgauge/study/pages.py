"""Records of a study in, one HTML page out, a section an experiment."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.answers import answer
from stepgauge.report.facts import page_facts
from stepgauge.report.findings import findings
from stepgauge.report.kernels import kernel_table
from stepgauge.report.page import Block, Elsewhere, Page, Section, Text
from stepgauge.report.run_page import reservations, run_page
from stepgauge.report.views import record_table
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.record import Record
from stepgauge.study import EXPERIMENTS
from stepgauge.study.experiment import Experiment, Machine, shipped
from stepgauge.study.run import remembered


def page_of(folder: Path, records: Sequence[Record]) -> Page:
    """Of a study, where its machine was noted beside the records; else as of any other run."""
    machine = remembered(folder)
    return study_page(records, machine, folder) if machine else run_page(records, folder)


def study_page(records: Sequence[Record], machine: Machine, folder: Path) -> Page:
    here = [record for record in records if record.environment.get("device") == machine.name]
    return Page(
        title="stepgauge study",
        sections=[_experiment(experiment, machine, folder, here) for experiment in EXPERIMENTS],
        facts=page_facts(here),
        findings=findings(here),
    )


def _experiment(
    experiment: Experiment, machine: Machine, folder: Path, records: Sequence[Record]
) -> Section:
    """The experiment's section: what was measured here, else the reason and what a GPU gave."""
    empty = Section(experiment.title, experiment.question, method=experiment.method)
    elsewhere = [] if machine.is_gpu else _elsewhere(experiment)
    reason = experiment.needs(machine)
    if reason and elsewhere:
        return dataclasses.replace(empty, blocks=[Text(f"Not run here: {reason}."), *elsewhere])
    if reason:
        return dataclasses.replace(empty, reason=reason)
    by_key = {(record.key, record.provenance): record for record in records}
    keys = [(job.asked.key, job.provenance) for job in experiment.jobs(machine, folder)]
    own = [by_key[key] for key in keys if key in by_key]
    if not own:
        return dataclasses.replace(empty, reason="not measured in this run")
    caution = [Text(f"On a CPU: {experiment.on_cpu}.")] if experiment.on_cpu and elsewhere else []
    try:
        blocks = [*caution, *reservations(own), *experiment.blocks(own),
                  *experiment.pictures(own, folder), *elsewhere]  # fmt: skip
        good = [record for record in own if record.status == "ok"]
        return dataclasses.replace(
            empty, blocks=blocks, answer=experiment.answer(good) if good else answer([])
        )
    except Exception as error:  # one section that cannot be drawn must not cost the others
        logging.getLogger(__name__).exception("the section of %s cannot be drawn", experiment.name)
        return dataclasses.replace(
            empty, reason=f"its section cannot be drawn: {type(error).__name__}: {error}"
        )


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
    return [Elsewhere(title, experiment.answer(records), [_table(records)])]


def _table(records: Sequence[Record]) -> Block:
    table = (kernel_table if records[0].kind in KERNELS else record_table)(records)
    return dataclasses.replace(table, caption=f"All rows. {table.caption}", folded=True)
