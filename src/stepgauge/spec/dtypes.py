"""What is asked of types: those of a step, and what sums in each of them make of the same terms."""

import dataclasses
from typing import ClassVar

from stepgauge.spec.fields import option
from stepgauge.spec.step import WorkSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class DtypesSpec(WorkSpec):
    """One row of `profile dtypes`: an uncompiled step in which every output is looked at."""

    kind: ClassVar[str] = "dtypes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile != "off":
            raise ValueError(
                f"compile is {self.compile!r}; a compiled module shows no outputs, types are "
                "probed eager"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccumulationSpec:
    """What `demo accumulation` runs."""

    kind: ClassVar[str] = "accumulation"

    device: str = option("cpu", "cpu, cuda, cuda:1, mps; auto takes the fastest there is")
