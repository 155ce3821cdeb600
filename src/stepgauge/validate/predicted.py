"""The modelled record of a spec: which part of cost/ predicts which kind of row, and what it looks up."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.cost.data_parallel import predict_data_parallel
from stepgauge.cost.layout import predict_layout
from stepgauge.cost.pipeline.step import predict_pipeline
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.step import predict
from stepgauge.cost.traced.traceable import TRACED, TracedSpec, has_formulas
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec

Shapes = Mapping[tuple[int, str], set[tuple[float, ...]]]  # by ranks and operation


def predicted(
    spec: object,
    hardware: HardwareFile,
    *,
    shortened: bool = False,
    asked: set[tuple[str, tuple[float, ...]]] | None = None,
) -> Record:
    """What the row of the spec is predicted to be on that machine. Raises ValueError for what is not
    modelled or not calibrated, and for the device of another kind of machine.

    shortened  for layouts by the hundred (cost/layout.py)
    asked      gets the operations that were looked up, with their sizes
    """
    hardware.require_kind(str(getattr(spec, "device", "")))
    machine = CalibratedMachine(hardware.on_ranks(getattr(spec, "ranks", 1)))
    if asked is not None:
        machine.requested = asked
    traced: list[TracedNetwork] = []
    if isinstance(spec, TracedSpec) and not has_formulas(spec):
        traced = traced_on(spec, hardware)
    match spec:
        case StepSpec():
            return predict(spec, machine, *traced)
        case DataParallelSpec():
            return predict_data_parallel(spec, machine, *traced)
        case LayoutSpec():
            return predict_layout(spec, machine, traced, shortened=shortened)
        case PipelineSpec():
            return predict_pipeline(spec, machine, traced)
    raise ValueError(f"{type(spec).__name__} has no cost model yet")


def shapes_of(specs: Sequence[Any], hardware: HardwareFile) -> Shapes:
    """Of the steps that can be predicted; of others it is said where they are tried."""
    found: dict[tuple[int, str], set[tuple[float, ...]]] = {}
    for spec in specs:
        asked: set[tuple[str, tuple[float, ...]]] = set()
        try:
            predicted(spec, hardware, asked=asked)
        except ValueError:
            continue
        for operation, sizes in asked:
            found.setdefault((getattr(spec, "ranks", 1), operation), set()).add(sizes)
    return found


def traced_on(spec: TracedSpec, hardware: HardwareFile) -> list[TracedNetwork]:
    """The operators of each stage of a step on a device of that kind, for which torch is imported. Raises
    ValueError for a step that cannot be traced.
    """
    try:
        from stepgauge.bench.operators import traced_apart
    except ModuleNotFoundError as error:
        raise ValueError(f"steps of {TRACED} are traced, which needs torch: {error}") from None

    peaks = hardware.peaks
    architecture = "cpu" if spec.device.startswith("cpu") else (peaks and peaks.architecture)
    return traced_apart(spec, architecture or "sm90")
