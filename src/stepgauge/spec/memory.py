"""The spec of `profile memory`."""

import dataclasses
from typing import ClassVar

from stepgauge.spec.fields import option
from stepgauge.spec.step import FLOAT8, PRECISIONS, WorkSpec
from stepgauge.spec.user_model import UserModel

# The categories of memory in a step.
PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARIES, OTHER = "activations", "temporaries", "other"
CATEGORIES = (PARAMETERS, STATE, GRADIENTS, ACTIVATIONS, TEMPORARIES, OTHER)
# Architectures for which memory can be predicted: torch's kernels on a CPU, an A100, or an H100 or H200.
PREDICTIONS = ("no", "cpu", "sm80", "sm90")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorySpec(WorkSpec):
    """One row of `profile memory`: a forward, then whole steps, with every storage tracked."""

    kind: ClassVar[str] = "memory"

    predict: str = option(
        "no",
        "Run nothing, predict for this device; sm80: A100, sm90: H100 and H200",
        choices=PREDICTIONS,
        flag_value="sm90",
        label="changed",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, UserModel) and self.compile != "off":
            raise ValueError(
                f"compile is {self.compile!r}; memory of a user's model is tracked only with off"
            )
        if self.precision == FLOAT8:
            raise ValueError(
                f"precision is {FLOAT8!r}; torchao's tensors cannot be tracked: choose one of "
                f"{', '.join(PRECISIONS)}"
            )
        if self.phases != "step":
            raise ValueError(
                f"phases is {self.phases!r}; memory is tracked over a whole step: choose step"
            )
        if self.predict != "no" and self.compile != "off":
            raise ValueError(
                f"compile is {self.compile!r}; memory of compiled code cannot be predicted: choose off"
            )

    @property
    def provenances(self) -> tuple[str, ...]:
        """Provenances of the resulting rows: with `predict` modelled only, with compile measured only."""
        if self.predict != "no":
            return ("modelled",)
        return ("modelled", "measured") if self.compile == "off" else ("measured",)

    @property
    def kept_is_known(self) -> bool:
        """True if autograd shows which tensors a compiled step keeps.

        Checkpointing around compiled blocks hides them.
        """
        return self.compile != "off" and (self.compile != "blocks" or self.checkpointing == "none")
