"""The spec of `plan`: a network, GPUs, a batch, and the settings of the step."""

import dataclasses
import math
import re
from typing import ClassVar

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import as_in, check, option
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import PRECISION_HELP, PRECISIONS, WorkSpec
from stepgauge.spec.user_model import UserModel

DEFAULT_BATCH = 1024
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:E\+?\d+)?)([KMGBT]?)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """A training run for which to rank layouts. The sequence length is the model's context_length.

    A user's model brings a batch; its global batch counts such batches.

    Raises ValueError for BERT, and for an invalid number of tokens or one below that of a single step.
    """

    kind: ClassVar[str] = "plan"

    model: ModelSpec | UserModel
    size: str = option("custom", "Preset network", label=True)
    gpus: int = option(8, "Total number of accelerators", least=1, most=100_000)
    global_batch: int = option(
        0,
        "Sequences per step, over all ranks; for your own model, batches of it; 0: "
        f"{DEFAULT_BATCH} sequences, or a batch per rank",
        least=0,
        most=10_000_000,
    )
    tokens: str = option(
        "0", "Tokens of the training run, such as 300B, to estimate its days; 0: no estimate"
    )
    precision: str = as_in(WorkSpec, "precision", PRECISION_HELP, choices=PRECISIONS)
    compile: str = as_in(WorkSpec, "compile")
    optimizer: str = as_in(WorkSpec, "optimizer")
    device: str = option("cuda", "cpu or cuda")

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.model, BertSpec):
            raise ValueError(
                "plan does not support BERT, whose layouts cannot be screened: predict one layout "
                "at a time"
            )
        default_batch = DEFAULT_BATCH
        if isinstance(self.model, UserModel):
            default_batch = self.gpus
            object.__setattr__(self, "size", self.model.factory)
            if self.num_tokens:
                raise ValueError(
                    f"tokens is {self.tokens!r}; the tokens of a user's model are not known"
                )
        object.__setattr__(self, "global_batch", self.global_batch or default_batch)
        if self.num_tokens:
            step = self.global_batch * self.network.context_length
            if self.num_tokens < step:
                raise ValueError(f"tokens is {self.tokens!r}; a single step has {step:,}")

    @property
    def network(self) -> ModelSpec:
        """The model, which must not be a user's, because its shape must be known."""
        assert isinstance(self.model, ModelSpec)
        return self.model

    @property
    def num_tokens(self) -> float:
        match = NUMBER.fullmatch(self.tokens.strip().upper())
        number = float(match[1]) * UNITS[match[2]] if match else math.inf
        if number == math.inf:
            raise ValueError(f"tokens is {self.tokens!r}; it must be a number such as 300B or 1e11")
        return number
