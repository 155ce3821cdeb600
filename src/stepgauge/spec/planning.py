"""What `plan` is asked: a network, GPUs, a batch, and how the step computes."""

import dataclasses
import re
from typing import ClassVar

from stepgauge.spec.fields import as_in, check, option
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import PRECISIONS, WorkSpec
from stepgauge.spec.user_model import UserModel

USUAL_BATCH = 1024
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """A training run to be laid out. The sequence length is the model's context_length.

    A user's network brings the batch of a rank: its global batch is a number of those.

    Raises ValueError for a number of tokens that is none, or less than a step's.
    """

    kind: ClassVar[str] = "plan"

    model: ModelSpec | UserModel
    size: str = option("custom", "preset that the model spec starts from", label=True)
    gpus: int = option(8, "accelerators in all", least=1, most=100_000)
    global_batch: int = option(
        0,
        f"sequences of a step, of all ranks, 0: {USUAL_BATCH}; of your own network, which brings "
        "the batch of a rank, such batches, 0: one a rank",
        least=0,
        most=10_000_000,
    )
    tokens: str = option("0", "tokens to train on: 300B; 0: no days are given")
    precision: str = as_in(WorkSpec, "precision", choices=PRECISIONS)
    compile: str = as_in(WorkSpec, "compile")
    optimizer: str = as_in(WorkSpec, "optimizer")
    device: str = option("cuda", "cpu or cuda; without it that of the hardware file")

    def __post_init__(self) -> None:
        check(self)
        usual = USUAL_BATCH
        if isinstance(self.model, UserModel):
            usual = self.gpus
            object.__setattr__(self, "size", self.model.factory)
            if self.num_tokens:
                raise ValueError(
                    f"tokens is {self.tokens!r}; those of a user's model are not known"
                )
        object.__setattr__(self, "global_batch", self.global_batch or usual)
        if self.num_tokens:
            step = self.global_batch * self.network.context_length
            if self.num_tokens < step:
                raise ValueError(f"tokens is {self.tokens!r}; a single step has {step:,}")

    @property
    def network(self) -> ModelSpec:
        """The model, where its shape is known: of a user's it is not."""
        assert isinstance(self.model, ModelSpec)
        return self.model

    @property
    def num_tokens(self) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGBT]?)", self.tokens.strip().upper())
        if match is None:
            raise ValueError(f"tokens is {self.tokens!r}; it must be a number such as 300B or 1.5T")
        return float(match[1]) * UNITS[match[2]]
