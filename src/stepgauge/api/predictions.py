"""Predicts steps and ranks layouts for another machine, as `stepgauge predict` and `stepgauge plan`
do. Only a user's own network needs torch.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepgauge.api.runs import without_main
from stepgauge.api.show import Run
from stepgauge.cost.rates.estimate import with_spread
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.fields import check_type
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.hardware_files import file_named
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.step import StepSpec
from stepgauge.validate.planned import planned
from stepgauge.validate.predicted import predicted


def predict(spec: Any, *, hardware: str | Path) -> Run:
    """Predicts one or several steps and returns a modelled record for each, in order.

    spec      a StepSpec, DataParallelSpec, LayoutSpec or PipelineSpec, or several of them
    hardware  a hardware file, or the name of one, such as "h100-sxm". Steps are predicted for its
              device, whatever device the spec names

    Raises ValueError for a missing file, and for a step that is not modelled or whose operations
    were not calibrated; TypeError for other specs.
    """
    file = HardwareFile.read(file_named(str(hardware)))
    are_several = isinstance(spec, Iterable) and not isinstance(spec, str | Mapping)
    specs = list(spec) if are_several else [spec]
    for each in specs:
        _require(each, StepSpec, DataParallelSpec, LayoutSpec, PipelineSpec)
    with without_main():  # networks without formulas are traced in another process
        return Run([with_spread(predicted(_on(each, file), file)) for each in specs])


def plan(spec: PlanSpec, *, hardware: str | Path, top: int = 10) -> Run:
    """Returns the best layouts of a training run, fastest first, as modelled records of bench layout.

    hardware  as in predict; the file may also have only published peaks, such as "dgx-h100"
    top       the largest number of layouts

    Raises ValueError if no layout fits, and as predict does.
    """
    _require(spec, PlanSpec)
    check_type("top", int, top)
    if top < 1:
        raise ValueError(f"top is {top}; it must be at least 1")
    file = HardwareFile.read(file_named(str(hardware)))
    with without_main():
        return Run(planned(_on(spec, file), file, top=top).rows[:top])


def _require(spec: Any, *kinds: type) -> None:
    """Raises TypeError unless the spec is of one of the kinds."""
    if not isinstance(spec, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{spec!r} is not a {names}")


def _on(spec: Any, file: HardwareFile) -> Any:
    """Returns the spec with the file's kind of device."""
    return dataclasses.replace(spec, device=file.device_kind)
