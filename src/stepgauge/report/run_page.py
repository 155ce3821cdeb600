"""Builds the HTML page of a run, with one section per kind of record."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stepgauge.report.answers import answer
from stepgauge.report.broadcast import broadcast_blocks
from stepgauge.report.comm import comm_blocks
from stepgauge.report.data_parallel import plots as data_parallel_plots
from stepgauge.report.dtypes import dtype_table
from stepgauge.report.facts import page_facts
from stepgauge.report.figure import MAX_BARS
from stepgauge.report.findings import findings
from stepgauge.report.kernel_plots import kernel_bars
from stepgauge.report.kernels import kernel_table
from stepgauge.report.layout import layout_blocks
from stepgauge.report.memory import memory_blocks
from stepgauge.report.names import labels
from stepgauge.report.ops import op_blocks
from stepgauge.report.page import Block, Page, Section, Text
from stepgauge.report.pipeline_steps import step_blocks
from stepgauge.report.prediction_errors import errors
from stepgauge.report.prediction_tables import section as predictions_section
from stepgauge.report.profile_page import read as read_profile
from stepgauge.report.profile_page import section as profile_section
from stepgauge.report.step_plots import phase_bars
from stepgauge.report.train import train_blocks
from stepgauge.report.views import record_table
from stepgauge.spec.disturbance import CRITERION, is_disturbed
from stepgauge.spec.fallbacks import fallbacks
from stepgauge.spec.first_names import first_names
from stepgauge.spec.kernel import KERNELS
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


QUESTIONS = {
    "step": "How long does a step take, and which phase takes most of it?",
    "train": "Does the loss fall, and how many tokens are trained on per second?",
    "profile": "Which kinds of work take the time of a step?",
    "memory": "What holds memory during a step, and what is the peak?",
    "comm": "How fast are the links, and how does time grow with size?",
    "data-parallel": "How much slower is a step when it runs on several ranks?",
    "layout": "Which layout trains fastest, and how much time does each of its axes take?",
    "pipeline": "How much time does a schedule spend waiting, and how much does each rank hold?",
    "op": "How fast is the function, and how fast could it be on this device?",
    "broadcast": "Which way of copying a tensor from the host to every device is the fastest?",
}


def _section(records: Sequence[Record], run: Sequence[Record]) -> Section:
    """Returns the section of records of one kind. `run` has the predictions of pipeline steps."""
    kind = records[0].kind
    draw = _BLOCKS.get(kind, lambda records: [record_table(records)])
    before = [*_shared_cpu_note(records), *warnings(records)]
    blocks = [*before, *draw(records), *step_blocks(records, run)]
    question = QUESTIONS.get(kind, "What was measured?")
    return Section(kind, question, blocks, answer=answer(records))


def _shared_cpu_note(records: Sequence[Record]) -> list[Text]:
    """Returns a note if all ranks ran as processes on one CPU."""
    multi_rank = [record for record in records if record.spec.get("ranks", 1) > 1]
    hosts = {host for record in multi_rank for host in record.environment.get("hosts", ["here"])}
    if len(hosts) != 1 or any(record.spec.get("device") != "cpu" for record in multi_rank):
        return []
    return [Text("The ranks were processes on one CPU. They share its cores; GPUs would not.")]


def _steps(records: Sequence[Record]) -> Sequence[Block]:
    """Returns bars of the phases, and the table."""
    shown = [record for record in records if record.status == "ok"][:MAX_BARS]
    bars = [phase_bars(shown, labels(shown), "Step time by phase.")] if shown else []
    return [*bars, record_table(records)]


def _profiles(records: Sequence[Record], folder: Path) -> list[Section]:
    """Returns a section per profile, made from the analysis in the run's folder."""
    return [
        profile_section(name, read_profile(record, folder), record.note)
        for name, record in zip(labels(records), records, strict=True)
    ]


_BLOCKS: Mapping[str, Callable[[Sequence[Record]], Sequence[Block]]] = {
    "step": _steps,
    "train": train_blocks,
    "memory": memory_blocks,
    "comm": comm_blocks,
    "broadcast": broadcast_blocks,
    "data-parallel": data_parallel_plots,
    "layout": layout_blocks,
    "op": lambda records: [block for each in records for block in op_blocks(each)],
    "dtypes": lambda records: [dtype_table(each) for each in records if "dtypes" in each.tables],
    **dict.fromkeys(KERNELS, lambda records: [*kernel_bars(records), kernel_table(records)]),
}
