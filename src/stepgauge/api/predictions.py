"""Steps predicted and layouts ranked on a machine that need not be there, as `stepgauge predict` and
`stepgauge plan` do. Only a user's own network needs torch.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.api.show import Run
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.hardware_files import file_named
from stepgauge.spec.planning import PlanSpec
from stepgauge.validate.planned import planned
from stepgauge.validate.predicted import predicted


def predict(spec: Any, *, hardware: str | Path) -> Run:
    """What a step takes, or each of several: a StepSpec, DataParallelSpec, LayoutSpec or PipelineSpec.

    hardware  a hardware file, or the name of one: "h100-sxm". Steps are predicted for its device,
              whatever device the spec names

    The records are modelled ones of the specs, in their order. Raises ValueError for a file that
    there is not, and for a step that is not modelled or whose operations were not calibrated.
    """
    file = HardwareFile.read(file_named(str(hardware)))
    specs = spec if isinstance(spec, Sequence) else [spec]
    return Run([predicted(_on(each, file), file) for each in specs])


def plan(spec: PlanSpec, *, hardware: str | Path, top: int = 10) -> Run:
    """The best layouts of a training run, fastest first: modelled records of bench layout's kind.

    hardware  as in predict; calibrated, or of published peaks: "dgx-h100"
    top       how many of them, at most

    Raises ValueError where nothing fits, and as predict does.
    """
    if top < 1:
        raise ValueError(f"top is {top}; it must be at least 1")
    file = HardwareFile.read(file_named(str(hardware)))
    return Run(planned(_on(spec, file), file, top=top).rows[:top])


def _on(spec: Any, file: HardwareFile) -> Any:
    """The spec on the device of the file."""
    return dataclasses.replace(spec, device=file.device_kind)
