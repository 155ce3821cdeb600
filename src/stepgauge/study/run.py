"""Runs the study on this machine."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from stepgauge.bench.sweep import Job
from stepgauge.measure.devices import resolve
from stepgauge.measure.environment import environment
from stepgauge.report.findings import findings
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.record import Record
from stepgauge.study import EXPERIMENTS
from stepgauge.study.experiment import Experiment, StudyMachine


def this_machine(device: str) -> StudyMachine:
    """Describes this machine. Raises ValueError if it does not have the device."""
    resolved = resolve(device)
    here = run_isolated(environment, resolved)
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    return StudyMachine(
        str(resolved),
        here["device"],
        here["device_bytes"],
        compiler is not None,
        max(1, torch.cuda.device_count()),
    )


def select(names: Sequence[str]) -> list[Experiment]:
    """Returns the experiments with these names; all experiments for []."""
    by_name = {experiment.name: experiment for experiment in EXPERIMENTS}
    return [by_name[name] for name in names or by_name]


def plan(machine: StudyMachine, folder: Path, experiments: Sequence[Experiment]) -> list[Job]:
    """Returns the jobs of the experiments that the machine can run, without duplicates."""
    jobs = [job for e in experiments if e.needs(machine) is None for job in e.jobs(machine, folder)]
    return list({job.pending.identity: job for job in jobs}.values())


def unconfirmed(jobs: Sequence[Job], records: Sequence[Record]) -> list[Job]:
    """Returns the jobs of all findings' rows if any finding is not confirmed, else []. Rows of confirmed
    findings are measured again too: findings share rows, and all must be measured in the same turns.
    """
    compared = [finding for finding in findings(records) if finding.rows]
    if all(finding.is_confirmed for finding in compared):
        return []
    keys = {row.key for finding in compared for row in finding.rows}
    return [job for job in jobs if job.pending.key in keys and job.provenance == "measured"]
