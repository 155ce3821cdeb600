"""Records in, one HTML page out, a section for each kind of record."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stepgauge.report.answers import answer
from stepgauge.report.broadcast import broadcast_blocks
from stepgauge.report.comm import comm_blocks
from stepgauge.report.data_parallel import plots as data_parallel_plots
from stepgauge.report.dtypes import dtype_table
from stepgauge.report.facts import page_facts
from stepgauge.report.figure import MOST_BARS
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
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.predictions import steps_beside
from stepgauge.spec.record import Record
from stepgauge.spec.store import StoreError

NAMED = 4  # of disturbed rows, in a section


def reservations(records: Sequence[Record]) -> list[Text]:
    """What a reader of the section has to know before its figures."""
    ran = dict.fromkeys(sentence for record in records for sentence in fallbacks(record))
    said = [f"No measure of our kernels here: {'; '.join(ran)}."] if ran else []
    names = zip(labels(records), records, strict=True)
    disturbed = [name for name, record in names if is_disturbed(record)]
    if disturbed:
        more = f" and {len(disturbed) - NAMED} more" if len(disturbed) > NAMED else ""
        said.append(
            f"Disturbed, marked † in plots ({CRITERION}): {'; '.join(disturbed[:NAMED])}{more}."
        )
    return [Text(sentence) for sentence in said]


def run_page(records: Sequence[Record], folder: Path) -> Page:
    """A section for each kind of record in the run, and where steps were predicted one of that."""
    shown = [row.record for row in steps_beside(records)]
    kinds = dict.fromkeys(record.kind for record in shown)
    sections = [_kind([r for r in shown if r.kind == kind], records) for kind in kinds]
    sections += _profiles([r for r in shown if r.kind == "profile"], folder)
    if errors(records):
        sections.insert(0, predictions_section(records))
    timed = sum("step_ms" in record.metrics for record in shown)
    found = findings(shown) if timed else None
    if timed == 1:  # which has nothing to be compared with
        found = found or None
    name = folder.resolve().name
    return Page(
        title=f"stepgauge: {name}", sections=sections, facts=page_facts(shown), findings=found
    )


QUESTIONS = {
    "step": "What does a step take, and which phase takes most of it?",
    "train": "Does the loss fall, and how fast are tokens trained on?",
    "profile": "Which kinds of work take the time of a step?",
    "memory": "What holds memory during a step, and what is the peak?",
    "comm": "What do the links give, and what does a byte cost?",
    "data-parallel": "What does training on several ranks cost a step?",
    "layout": "Which layout trains fastest, and what does each of its axes cost?",
    "pipeline": "What does a schedule cost beside computing, and how much does each rank hold?",
    "op": "How fast is it, and how fast could it be here?",
    "broadcast": "Which way of copying a tensor from the host to every device is the fastest?",
}


def _kind(records: Sequence[Record], run: Sequence[Record]) -> Section:
    """The rows of one kind; steps of pipelines are drawn below their predictions in the run."""
    kind = records[0].kind
    draw = _BLOCKS.get(kind, lambda records: [record_table(records)])
    reserved = [*_of_processes(records), *reservations(records)]
    blocks = [*reserved, *draw(records), *step_blocks(records, run)]
    question = QUESTIONS.get(kind, "What was measured?")
    return Section(kind, question, blocks, answer=answer(records))


def _of_processes(records: Sequence[Record]) -> list[Text]:
    """That ranks were processes of one CPU, where all of them were."""
    of_ranks = [record for record in records if record.spec.get("ranks", 1) > 1]
    hosts = {host for record in of_ranks for host in record.environment.get("hosts", ["here"])}
    if len(hosts) != 1 or any(record.spec.get("device") != "cpu" for record in of_ranks):
        return []
    return [Text("Ranks were processes of one CPU: they share it, as GPUs do not.")]


def _steps(records: Sequence[Record]) -> Sequence[Block]:
    """Bars of the phases, and the table."""
    shown = [record for record in records if record.status == "ok"][:MOST_BARS]
    bars = [phase_bars(shown, labels(shown), "Step time by phase.")] if shown else []
    return [*bars, record_table(records)]


def _profiles(records: Sequence[Record], folder: Path) -> list[Section]:
    """A section a profile, from the analyses that lie in the run's folder."""
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


def write(page: Page, path: Path) -> Path:
    """Raises StoreError where it cannot be written."""
    try:
        path.write_text(page.html(), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from None
    return path
