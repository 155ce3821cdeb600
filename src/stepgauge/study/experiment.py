"""What an experiment is: what it needs, what it runs, what it answers and what it shows."""

import dataclasses
import importlib.resources
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgauge.report.answers import answer
from stepgauge.report.page import Block
from stepgauge.spec.record import Record

if TYPE_CHECKING:
    from stepgauge.bench.sweep import Job


@dataclasses.dataclass(frozen=True)
class StudyMachine:
    """What experiments decide by. `bytes` is the memory of the device; `gpus` how many there are."""

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
    """One row of the study.

    name      how the command line selects it
    title     of its section
    question  that its section answers, one sentence
    method    how the figures come about
    specs     what it measures on a machine, in a folder of the run: specs, or jobs of its own
    blocks    what its section shows of its own records
    answer    one or two sentences that its records answer the question with
    pictures  what it shows of files that lie beside the records, in the folder of the run
    needs     why the machine cannot run it, or None
    on_cpu    what its figures are not, where they are a CPU's
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
        """What measures it on the machine."""
        from stepgauge.bench.jobs import jobs_of  # torch, which a page needs not
        from stepgauge.bench.sweep import Job

        asked = self.specs(machine, folder)
        own = [[each] if isinstance(each, Job) else jobs_of(each, folder) for each in asked]
        return [job for jobs in own for job in jobs]


def needs_two_gpus(machine: StudyMachine) -> str | None:
    """Of ranks: on a machine without GPUs they are processes."""
    return "needs two GPUs" if machine.is_gpu and machine.gpus < 2 else None


def shipped(name: str) -> list[Record]:
    """Records of GPU machines that come with the package, for the experiment of that name; of
    sharded state they are those of data parallel training.
    """
    folder = importlib.resources.files(__package__) / "shipped"
    path = folder / f"{'data-parallel' if name == 'sharded-state' else name}.jsonl"
    if not path.is_file():
        return []
    return [Record.from_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
