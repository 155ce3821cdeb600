"""The spec of `profile step`."""

import dataclasses
from typing import ClassVar

from stepgauge.spec.fields import option
from stepgauge.spec.step import StepSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSpec(StepSpec):
    """One row of `profile step`: a step timed without the profiler, then profiled."""

    kind: ClassVar[str] = "profile"

    wait: int = option(1, "Steps before the profiler warms up", least=0, most=100_000)
    profiler_warmup: int = option(
        2, "Profiler warm-up steps, whose events are discarded", least=0, most=1000
    )
    active: int = option(3, "Recorded steps", least=1, most=1000)
    repeat: int = option(1, "Repetitions of wait, warm-up and recording", least=1, most=100)
    stacks: bool = option(
        False,
        "Also record Python stacks, which makes profiling slower and traces larger",
        flag_value=True,
    )
