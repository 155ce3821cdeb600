"""A profiled step as it is asked for."""

import dataclasses
from typing import ClassVar

from stepgauge.spec.fields import option
from stepgauge.spec.step import StepSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSpec(StepSpec):
    """One row of `profile step`: a StepSpec by the stopwatch, then under the profiler."""

    kind: ClassVar[str] = "profile"

    wait: int = option(1, "steps that pass before the profiler warms up", least=0, most=100_000)
    profiler_warmup: int = option(
        2, "steps in which the profiler warms up, discarded", least=0, most=1000
    )
    active: int = option(3, "recorded steps", least=1, most=1000)
    repeat: int = option(1, "how often to wait, warm up and record", least=1, most=100)
    stacks: bool = option(False, "record Python stacks too: slower, larger", flag_value=True)
