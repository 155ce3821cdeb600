"""What `plan` is asked: a network, GPUs, a batch, and how the step computes."""

import dataclasses
import re
from typing import ClassVar

from stepgauge.spec.fields import as_in, check, option
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec

UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """A training run to be laid out. The sequence length is the model's context_length.

    Raises ValueError for a number of tokens that is none.
    """

    kind: ClassVar[str] = "plan"

    model: ModelSpec
    size: str = option("custom", "preset that the model spec starts from", label=True)
    gpus: int = option(8, "accelerators in all", least=1, most=100_000)
    global_batch: int = option(1024, "sequences of a step, of all ranks", least=1, most=10_000_000)
    tokens: str = option("0", "tokens to train on: 300B; 0: no days are given")
    precision: str = as_in(WorkSpec, "precision")
    compile: str = as_in(WorkSpec, "compile")
    optimizer: str = as_in(WorkSpec, "optimizer")
    device: str = option("cuda", "cpu or cuda")

    def __post_init__(self) -> None:
        check(self)
        self.num_tokens  # noqa: B018 - raises for a text that is no number

    @property
    def num_tokens(self) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", self.tokens.strip().upper())
        if match is None:
            raise ValueError(f"tokens is {self.tokens!r}; it must be a number such as 300B or 1.5T")
        return float(match[1]) * UNITS[match[2]]
