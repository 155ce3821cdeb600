"""Builds the HTML page of a run, with one section per kind of record."""

from collections.abc import Sequence
from pathlib import Path

from stepgauge.report.facts import page_facts
from stepgauge.report.findings import findings
from stepgauge.report.kinds import answer, kind_of
from stepgauge.report.names import labels
from stepgauge.report.page import Page, Section, Text
from stepgauge.report.pipeline_steps import step_blocks
from stepgauge.report.prediction_errors import errors
from stepgauge.report.prediction_tables import section as predictions_section
from stepgauge.report.profile_page import read as read_profile
from stepgauge.report.profile_page import section as profile_section
from stepgauge.spec.disturbance import CRITERION, is_disturbed
from stepgauge.spec.fallbacks import fallbacks
from stepgauge.spec.first_names import first_names
from stepgauge.spec.predictions import pair_steps
from stepgauge.spec.record import Record

MAX_NAMED = 4  # disturbed rows that a section names; the others are counted


def warnings(records: Sequence[Record]) -> list[Text]:
    """Returns warnings that come before a section's figures: fallbacks and disturbed rows."""
    ran = dict.fromkeys(sentence for record in records for sentence in fallbacks(record))
    sentences = [f"Our kernels were not measured: {'; '.join(ran)}."] if ran else []
    names = zip(labels(records), records, strict=True)
    disturbed = [name for name, record in names if is_disturbed(record)]
    if disturbed:
        sentences.append(
            f"Disturbed rows, marked † in plots ({CRITERION}): "
            f"{first_names(disturbed, MAX_NAMED, separator='; ')}."
        )
    return [Text(sentence) for sentence in sentences]


def run_page(records: Sequence[Record], folder: Path) -> Page:
    """Returns a page with a section per kind of record. If steps were predicted, a section on the
    prediction errors comes first.
    """
    shown = [row.record for row in pair_steps(records)]
    kinds = dict.fromkeys(record.kind for record in shown)
    sections = [_section([r for r in shown if r.kind == kind], records) for kind in kinds]
    sections += _profiles([r for r in shown if r.kind == "profile"], folder)
    if errors(records):
        sections.insert(0, predictions_section(records))
    timed = sum("step_ms" in record.metrics for record in shown)
    found = findings(shown) if timed else None
    if timed == 1:  # a single row cannot be compared, so an empty list says nothing
        found = found or None
    name = folder.resolve().name
    return Page(
        title=f"stepgauge: {name}", sections=sections, facts=page_facts(shown), findings=found
    )


def _section(records: Sequence[Record], run: Sequence[Record]) -> Section:
    """Returns the section of records of one kind. `run` has the predictions of pipeline steps."""
    kind = records[0].kind
    shown = kind_of(kind)
    before = [*_shared_cpu_note(records), *warnings(records)]
    blocks = [*before, *shown.blocks(records), *step_blocks(records, run)]
    return Section(kind, shown.question, blocks, answer=answer(records))


def _shared_cpu_note(records: Sequence[Record]) -> list[Text]:
    """Returns a note if all ranks ran as processes on one CPU."""
    multi_rank = [record for record in records if record.spec.get("ranks", 1) > 1]
    hosts = {host for record in multi_rank for host in record.environment.get("hosts", ["here"])}
    if len(hosts) != 1 or any(record.spec.get("device") != "cpu" for record in multi_rank):
        return []
    return [Text("The ranks were processes on one CPU. They share its cores; GPUs would not.")]


def _profiles(records: Sequence[Record], folder: Path) -> list[Section]:
    """Returns a section per profile, made from the analysis in the run's folder."""
    return [
        profile_section(name, read_profile(record, folder), record.note)
        for name, record in zip(labels(records), records, strict=True)
    ]
