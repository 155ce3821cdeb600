"""What an experiment is: what it needs, what it runs, and what it shows."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from stepgauge.bench.sweep import Job
from stepgauge.report.page import Block
from stepgauge.spec.record import Record


@dataclasses.dataclass(frozen=True)
class Machine:
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
    jobs      what it runs on a machine, in a folder of the run
    blocks    what its section shows of its own records
    pictures  what it shows of files that lie beside the records, in the folder of the run
    needs     why the machine cannot run it, or None
    """

    name: str
    title: str
    question: str
    method: str
    jobs: Callable[[Machine, Path], Sequence[Job]]
    blocks: Callable[[Sequence[Record]], Sequence[Block]]
    pictures: Callable[[Sequence[Record], Path], Sequence[Block]] = lambda records, folder: ()
    needs: Callable[[Machine], str | None] = lambda machine: None
