"""The memory of a step as it is asked for."""

import dataclasses
from typing import ClassVar

from stepgauge.spec.fields import option
from stepgauge.spec.step import FLOAT8, PRECISIONS, WorkSpec
from stepgauge.spec.user_model import UserModel

# What a step holds memory for.
PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARIES, OTHER = "activations", "temporaries", "other"
CATEGORIES = (PARAMETERS, STATE, GRADIENTS, ACTIVATIONS, TEMPORARIES, OTHER)
# Where a step is predicted for: with the kernels that torch takes on a CPU, an A100 or an H100.
PREDICTIONS = ("no", "cpu", "sm80", "sm90")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorySpec(WorkSpec):
    """One row of `profile memory`: a forward, then whole steps, every storage tracked."""

    kind: ClassVar[str] = "memory"

    predict: str = option(
        "no",
        "run nothing, predict for that device; sm80 is A100, sm90 H100",
        choices=PREDICTIONS,
        flag_value="sm90",
        label="changed",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, UserModel) and self.compile != "off":
            raise ValueError(
                f"compile is {self.compile!r}; a user's model is tracked without compile"
            )
        if self.precision == FLOAT8:
            raise ValueError(
                f"precision is {FLOAT8!r}; tensors of torchao are not tracked: choose one of "
                f"{', '.join(PRECISIONS)}"
            )
        if self.phases != "step":
            raise ValueError(f"phases is {self.phases!r}; memory is tracked through a whole step")
        if self.predict != "no" and self.compile != "off":
            raise ValueError(
                f"compile is {self.compile!r}; memory of compiled code is measured, not predicted"
            )

    @property
    def provenances(self) -> tuple[str, ...]:
        """Of the rows that it has: compiled code is measured only, and for a device that need not be
        there a step is predicted only.
        """
        if self.predict != "no":
            return ("modelled",)
        return ("modelled", "measured") if self.compile == "off" else ("measured",)

    @property
    def kept_is_told(self) -> bool:
        """Whether autograd can be asked what a compiled step keeps: a checkpoint around a graph
        hides it.
        """
        return self.compile != "off" and (self.compile != "blocks" or self.checkpointing == "none")
