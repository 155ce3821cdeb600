"""Runs the study on this machine and writes its report."""

import collections
import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from stepgauge.bench.sweep import Job
from stepgauge.measure.devices import resolve
from stepgauge.measure.environment import environment
from stepgauge.report.names import flatten, labels
from stepgauge.report.numbers import number
from stepgauge.report.page import Headline, Section, Text, page
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.fallbacks import fallbacks
from stepgauge.spec.hardware import peaks
from stepgauge.spec.model import FLOP_CONVENTION
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore, StoreError
from stepgauge.study import EXPERIMENTS
from stepgauge.study.experiment import Experiment, Machine

DISTURBED = 1.5
NAMED = 4  # of disturbed rows, in a section
MACHINE_FILE = "machine.json"


def this_machine(device: str) -> Machine:
    """Raises ValueError for a device that is not there."""
    resolved = resolve(device)
    found = run_isolated(environment, resolved)
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    return Machine(
        str(resolved),
        found["device"],
        found["device_bytes"],
        compiler is not None,
        max(1, torch.cuda.device_count()),
    )


def select(names: Sequence[str]) -> list[Experiment]:
    """The experiments of those names, all for none. Raises ValueError for an unknown one."""
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    for name in names:
        if name not in known:
            raise ValueError(f"experiment is {name!r}; choose from {', '.join(known)}")
    return [known[name] for name in names or known]


def plan(machine: Machine, folder: Path, experiments: Sequence[Experiment]) -> list[Job]:
    """The jobs of all experiments that the machine can run, what two of them share once."""
    jobs = [job for e in experiments if e.needs(machine) is None for job in e.jobs(machine, folder)]
    return list({job.asked.key: job for job in jobs}.values())


def remember(machine: Machine, folder: Path) -> None:
    """Notes the machine beside the records, so that the report can be written again elsewhere."""
    try:
        (folder / MACHINE_FILE).write_text(json.dumps(dataclasses.asdict(machine)))
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror}") from None


def write_report(store: RunStore, records: Sequence[Record], path: Path) -> Path:
    """Writes the HTML file. Raises StoreError where it cannot, or where the run is no study."""
    try:
        machine = Machine(**json.loads((store.folder / MACHINE_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        raise StoreError(
            f"{store.folder} is not the run of a study: it has no readable {MACHINE_FILE}"
        ) from None
    here = [record for record in records if record.environment.get("device") == machine.name]
    sections = [_section(experiment, machine, store.folder, here) for experiment in EXPERIMENTS]
    text = page("stepgauge study", sections, facts=_facts(here), headlines=_headlines(here))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from None
    return path


def _section(
    experiment: Experiment, machine: Machine, folder: Path, records: Sequence[Record]
) -> Section:
    """The experiment's section, or the reason why it has none."""
    bare = Section(experiment.title, experiment.question, method=experiment.method)
    reason = experiment.needs(machine)
    if reason:
        return dataclasses.replace(bare, reason=reason)
    by_key = collections.defaultdict(list)  # a measurement, and what was predicted of it
    for record in records:
        by_key[record.key].append(record)
    own = [record for job in experiment.jobs(machine, folder) for record in by_key[job.asked.key]]
    if not own:
        return dataclasses.replace(bare, reason="not measured in this run")
    try:
        blocks = [*reservations(own), *experiment.blocks(own), *experiment.pictures(own, folder)]
        return dataclasses.replace(bare, blocks=blocks)
    except Exception as error:  # one section that cannot be drawn must not cost the others
        return dataclasses.replace(
            bare, reason=f"its section cannot be drawn: {type(error).__name__}: {error}"
        )


def reservations(records: Sequence[Record]) -> list[Text]:
    """What a reader of the section has to know before its figures."""
    said = list(dict.fromkeys(sentence for record in records for sentence in fallbacks(record)))
    if said:
        said = [f"No measure of our kernels here: {'; '.join(said)}."]
    names = zip(labels(records), records, strict=True)
    disturbed = [name for name, record in names if _is_disturbed(record)]
    if disturbed:
        many = f" and {len(disturbed) - NAMED} more" if len(disturbed) > NAMED else ""
        said.append(
            f"To be doubted, since p90 is over {DISTURBED} times p10: {'; '.join(disturbed[:NAMED])}{many}."
        )
    return [Text(sentence) for sentence in said]


def _is_disturbed(record: Record) -> bool:
    step = record.metrics.get("step_ms")
    return step is not None and step.p90 > DISTURBED * step.p10


def _facts(records: Sequence[Record]) -> dict[str, str]:
    if not records:
        return {}
    where = records[-1].environment
    gib = f"{where['device_bytes'] / 2**30:.0f} GiB"
    facts = {
        "Device": f"{where['device']}, {gib}",
        "Host": f"{where['cpu']}, {where['cores']} cores, {where['os']}",
        "Software": f"Python {where['python']}, torch {where['torch']}, stepgauge {where['stepgauge']}",
        "Commit": str(where.get("commit") or "not from a repository"),
        "Measured": f"{min(r.created for r in records)} to {max(r.created for r in records)}",
    }
    known = peaks(where["device"])
    if known:
        rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in known.flops.items())
        facts["Dense peak"] = f"{rates} TFLOP/s ({known.source})"
    facts["FLOPs"] = FLOP_CONVENTION
    not_ok = [record for record in records if record.status != "ok"]
    timed = sum("step_ms" in record.metrics for record in records)
    disturbed = sum(map(_is_disturbed, records))
    if disturbed:
        facts["Spread"] = (
            f"in {disturbed} of {timed} timed rows p90 is over {DISTURBED} times p10: the machine was not idle"
        )
    facts["Rows"] = f"{len(records) - len(not_ok)} measured" + (
        f", {len(not_ok)} did not fit or failed" if not_ok else ""
    )
    return facts


def _headlines(records: Sequence[Record]) -> list[Headline]:
    """The fastest and largest that was measured: what a reader looks for first."""
    steps = [r for r in records if r.kind == "step" and r.status == "ok" and "step_ms" in r.metrics]
    if not steps:
        return []

    def named(record: Record) -> str:
        spec = flatten(record.spec)
        return f"{spec['size']}, {spec['precision']}" + (
            ", compiled" if spec["compile"] != "off" else ""
        )

    most_tokens = max(steps, key=lambda r: r.median("tokens_per_s") or 0.0)
    most_flops = max(steps, key=lambda r: r.median("tflop_per_s") or 0.0)
    found = [
        Headline(
            number(most_tokens.median("tokens_per_s")), "tokens/s", f"fastest: {named(most_tokens)}"
        ),
        Headline(
            number(most_flops.median("tflop_per_s")),
            "TFLOP/s",
            f"hardest working: {named(most_flops)}",
        ),
    ]
    if "mfu" in most_flops.metrics:
        percent = f"{100 * (most_flops.median('mfu') or 0.0):.1f}"
        found.append(Headline(percent, "% MFU", named(most_flops)))
    found += [
        Headline(number(r.median("held_out")), "bits/byte", "held out after training")
        for r in records
        if r.kind == "train" and r.status == "ok"
    ]
    return found
