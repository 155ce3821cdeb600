"""Specs about dtypes: which ones a step uses, and how exact sums are in each."""

import dataclasses
from typing import ClassVar

from stepgauge.spec.fields import DEVICE_HELP, option
from stepgauge.spec.step import WorkSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class DtypesSpec(WorkSpec):
    """One row of `profile dtypes`: an uncompiled step that records the dtype of every output."""

    kind: ClassVar[str] = "dtypes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile != "off":
            raise ValueError(
                f"compile is {self.compile!r}; the outputs of compiled modules cannot be observed: "
                "choose off"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccumulationSpec:
    """The demonstration of `demo accumulation`."""

    kind: ClassVar[str] = "accumulation"

    device: str = option("cpu", DEVICE_HELP)
