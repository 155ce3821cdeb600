"""The type of an experiment: its requirements, specs, answer and report section."""

import dataclasses
import importlib.resources
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgauge.report.kinds import answer
from stepgauge.report.page import Block
from stepgauge.spec.record import Record

if TYPE_CHECKING:
    from stepgauge.bench.sweep import Job


@dataclasses.dataclass(frozen=True)
class StudyMachine:
    """The machine that runs the study. `bytes` is the memory of its device, `gpus` their number."""

    device: str
    name: str
    bytes: int
    has_compiler: bool
    gpus: int = 1

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment of the study.

    name      its name on the command line
    title     the title of its section
    question  the question that its section answers, one sentence
    method    how the figures are measured
    specs     returns the specs or jobs that it measures on a machine, given the run's folder
    blocks    returns the content of its section, from its records
    answer    returns one or two sentences that answer the question, from its records
    pictures  returns content made from other files in the run's folder
    needs     returns why the machine cannot run it, or None
    on_cpu    why its figures differ from a GPU's if it runs on a CPU
    """

    name: str
    title: str
    question: str
    method: str
    specs: Callable[[StudyMachine, Path], Sequence[Any]]
    blocks: Callable[[Sequence[Record]], Sequence[Block]]
    answer: Callable[[Sequence[Record]], str] = answer
    pictures: Callable[[Sequence[Record], Path], Sequence[Block]] = lambda records, folder: ()
    needs: Callable[[StudyMachine], str | None] = lambda machine: None
    on_cpu: str = ""

    def jobs(self, machine: StudyMachine, folder: Path) -> list["Job"]:
        """Returns the jobs that measure it on the machine."""
        from stepgauge.bench.jobs import jobs_of  # imports torch, which writing a page must not
        from stepgauge.bench.sweep import Job

        jobs: list[Job] = []
        for each in self.specs(machine, folder):
            jobs += [each] if isinstance(each, Job) else jobs_of(each, folder)
        return jobs


def needs_two_gpus(machine: StudyMachine) -> str | None:
    """For experiments with several ranks. Without any GPU, ranks are processes on the CPU."""
    return "needs two GPUs" if machine.is_gpu and machine.gpus < 2 else None


def shipped(name: str) -> list[Record]:
    """Returns the experiment's records from a GPU machine that come with the package; [] for none."""
    folder = importlib.resources.files(__package__) / "shipped"
    path = folder / f"{'data-parallel' if name == 'sharded-state' else name}.jsonl"
    if not path.is_file():
        return []
    return [Record.from_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
