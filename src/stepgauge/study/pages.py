"""Records in, one HTML page out: of a study, or of any other run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stepgauge.bench import profile
from stepgauge.report.answers import answer
from stepgauge.report.broadcast import broadcast_blocks
from stepgauge.report.comm import comm_blocks
from stepgauge.report.dtypes import dtype_table
from stepgauge.report.findings import findings
from stepgauge.report.kernel_plots import kernel_bars
from stepgauge.report.kernels import kernel_table
from stepgauge.report.layout import layout_blocks
from stepgauge.report.memory import memory_blocks
from stepgauge.report.names import labels
from stepgauge.report.ops import op_blocks
from stepgauge.report.page import Block, Elsewhere, Page, Section, Text
from stepgauge.report.pipeline_steps import step_blocks
from stepgauge.report.profile_page import section as profile_section
from stepgauge.report.step_plots import phase_bars
from stepgauge.report.train import train_blocks
from stepgauge.report.views import record_table
from stepgauge.spec.disturbance import DISTURBED, is_disturbed
from stepgauge.spec.fallbacks import fallbacks
from stepgauge.spec.hardware import peaks
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.model import FLOP_CONVENTION
from stepgauge.spec.predictions import steps_beside
from stepgauge.spec.record import Record
from stepgauge.spec.store import StoreError
from stepgauge.study import EXPERIMENTS, data_parallel
from stepgauge.study.experiment import Experiment, Machine, shipped
from stepgauge.study.run import remembered
from stepgauge.validate.errors import errors as validated
from stepgauge.validate.views import section as predictions_section

NAMED = 4  # of disturbed rows, in a section
MOST_BARS = 24


def page_of(folder: Path, records: Sequence[Record]) -> Page:
    """Of a run: of a study, or of any other."""
    machine = remembered(folder)
    return study_page(records, machine, folder) if machine else run_page(records, folder)


def write(page: Page, path: Path) -> Path:
    """Raises StoreError where it cannot be written."""
    try:
        path.write_text(page.html(), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from None
    return path


def study_page(records: Sequence[Record], machine: Machine, folder: Path) -> Page:
    here = [record for record in records if record.environment.get("device") == machine.name]
    return Page(
        title="stepgauge study",
        sections=[_experiment(experiment, machine, folder, here) for experiment in EXPERIMENTS],
        facts=_facts(here),
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


def reservations(records: Sequence[Record]) -> list[Text]:
    """What a reader of the section has to know before its figures."""
    ran = dict.fromkeys(sentence for record in records for sentence in fallbacks(record))
    said = [f"No measure of our kernels here: {'; '.join(ran)}."] if ran else []
    names = zip(labels(records), records, strict=True)
    disturbed = [name for name, record in names if is_disturbed(record)]
    if disturbed:
        more = f" and {len(disturbed) - NAMED} more" if len(disturbed) > NAMED else ""
        said.append(
            f"Disturbed, marked † in plots: p90 is over {DISTURBED} × p10 of "
            f"{'; '.join(disturbed[:NAMED])}{more}."
        )
    return [Text(sentence) for sentence in said]


def run_page(records: Sequence[Record], folder: Path) -> Page:
    """A section for each kind of record in the run, and where steps were predicted one of that."""
    shown = [row.record for row in steps_beside(records)]
    kinds = dict.fromkeys(record.kind for record in shown)
    sections = [_kind([r for r in shown if r.kind == kind], records) for kind in kinds]
    sections += _profiles([r for r in shown if r.kind == "profile"], folder)
    if validated(records):
        sections.insert(0, predictions_section(records))
    timed = sum("step_ms" in record.metrics for record in shown)
    found = findings(shown) if timed else None
    if timed == 1 and not found:  # one row has nothing to be compared with
        found = None
    name = folder.resolve().name
    return Page(title=f"stepgauge: {name}", sections=sections, facts=_facts(shown), findings=found)


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
    ranks = [record for record in records if record.spec.get("ranks", 1) > 1]
    hosts = {host for record in ranks for host in record.environment.get("hosts", ["here"])}
    shared = all(record.spec.get("device") == "cpu" for record in ranks) and len(hosts) == 1
    return (
        [Text("Ranks were processes of one CPU: they share it, as GPUs do not.")] if shared else []
    )


def _steps(records: Sequence[Record]) -> Sequence[Block]:
    """Bars of the phases, and the table."""
    shown = [record for record in records if record.status == "ok"][:MOST_BARS]
    bars = [phase_bars(shown, labels(shown), "Step time by phase.")] if shown else []
    return [*bars, record_table(records)]


def _profiles(records: Sequence[Record], folder: Path) -> list[Section]:
    """A section a profile, from the analyses that lie in the run's folder."""
    return [
        profile_section(name, profile.read(record, folder), record.note)
        for name, record in zip(labels(records), records, strict=True)
    ]


_BLOCKS: Mapping[str, Callable[[Sequence[Record]], Sequence[Block]]] = {
    "step": _steps,
    "train": train_blocks,
    "memory": memory_blocks,
    "comm": comm_blocks,
    "broadcast": broadcast_blocks,
    "data-parallel": data_parallel.plots,
    "layout": layout_blocks,
    "op": lambda records: [block for each in records for block in op_blocks(each)],
    "dtypes": lambda records: [dtype_table(each) for each in records if "dtypes" in each.tables],
    **dict.fromkeys(KERNELS, lambda records: [*kernel_bars(records), kernel_table(records)]),
}


def _facts(records: Sequence[Record]) -> dict[str, str]:
    facts = measured_where(records)
    devices = {str(r.environment["device"]) for r in records if r.environment.get("device")}
    known = peaks(devices.pop()) if len(devices) == 1 else None
    if known:
        rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in known.flops.items())
        facts["Dense peak"] = f"{rates} TFLOP/s ({known.source})"
    if any("tflop_per_s" in record.metrics for record in records):
        facts["FLOPs"] = FLOP_CONVENTION
    disturbed = sum(map(is_disturbed, records))
    if disturbed:
        facts["Spread"] = (
            f"{disturbed} of {len(records)} rows are disturbed (p90 over {DISTURBED} × p10): the "
            "machine was not idle. No finding rests on them."
        )
    ok = [record for record in records if record.status == "ok"]
    measured = sum(record.provenance == "measured" for record in ok)
    counts = {
        "measured": measured,
        "predicted": len(ok) - measured,
        "did not fit or failed": len(records) - len(ok),
    }
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return {**facts, "Rows": told or "none"}


def measured_where(records: Sequence[Record]) -> dict[str, str]:
    """Device, host, software, commit and times of the records; what they do not know is left out."""
    known = [record for record in records if record.environment]
    if not known:
        return {}
    where = known[-1].environment
    software = {"Python": "python", "torch": "torch", "Triton": "triton", "stepgauge": "stepgauge"}
    cores = f"{where['cores']} cores" if where.get("cores") else ""
    size = f"{where['device_bytes'] / 2**30:.0f} GiB" if where.get("device_bytes") else ""
    times = sorted(record.created for record in known if record.created)
    hosts = list(dict.fromkeys(where.get("hosts", [])))
    facts = {
        "Device": _listed(where.get("device"), size),
        "Host": _listed(where.get("cpu"), cores, where.get("os")),
        "Software": _listed(
            *(f"{name} {where[key]}" for name, key in software.items() if where.get(key))
        ),
        "Library": _listed(where.get("library")),
        "Hosts": _listed(*hosts) if len(hosts) > 1 else "",
        "Commit": _listed(where.get("commit")),
        "Measured": " to ".join(dict.fromkeys(map(_minute, [*times[:1], *times[-1:]]))),
    }
    return {name: told for name, told in facts.items() if told}


def _minute(created: str) -> str:
    """Of an ISO 8601 time in UTC."""
    return f"{created[:16].replace('T', ' ')} UTC"


def _listed(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)
