"""A training step of a preset, or of a person's own model."""

import dataclasses

from stepgauge.spec.fields import option
from stepgauge.spec.step import WorkSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnWorkSpec(WorkSpec):
    """A step whose network and batch may be a factory's. `size` is then the function's name;
    `model` is idle.

    Raises ValueError for what an own model decides itself.
    """

    own: str = option(
        "",
        "your own model as FILE.py:factory, which returns (module, batch)",
        word="{own}",
        quiet="",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.own:
            return
        object.__setattr__(self, "size", self.own.rpartition(":")[2])
        if self.data != "random":
            raise ValueError(f"data is {self.data!r}; an own model brings its own batch")
        if self.checkpointing != "none":
            raise ValueError(
                f"checkpointing is {self.checkpointing!r}; an own model chooses its own"
            )
