"""Returns the modelled record of a spec, from the part of cost/ that predicts its kind."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepgauge.cost.data_parallel import predict_data_parallel
from stepgauge.cost.layout import predict_layout
from stepgauge.cost.pipeline.step import predict_pipeline
from stepgauge.cost.rates.machine import CalibratedMachine, Requested
from stepgauge.cost.step import predict
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.cost.traced.traceable import TRACED, TracedSpec, has_formulas
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.spec.user_model import UserModel

Shapes = Mapping[tuple[int, str], set[tuple[float, ...]]]  # by ranks and operation


def predicted(
    spec: object,
    hardware: HardwareFile,
    *,
    shortened: bool = False,
    requested: Requested | None = None,
) -> Record:
    """Predicts the row of a spec on the machine of the hardware file.

    shortened  for planning with hundreds of layouts (cost/layout.py)
    requested  a set to which the operations that were looked up are added, with their sizes

    Raises ValueError for what is not modelled or not calibrated, and if the file is of another kind of
    device.
    """
    hardware.require_kind(str(getattr(spec, "device", "")))
    machine = CalibratedMachine(hardware.on_ranks(getattr(spec, "ranks", 1)), requested=requested)
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
    """Returns the operations and sizes that predictions of the steps look up.

    Leaves out steps that cannot be predicted; the caller reports them when it predicts them.
    """
    shapes: dict[tuple[int, str], set[tuple[float, ...]]] = {}
    for spec in specs:
        requested: Requested = set()
        try:
            predicted(spec, hardware, requested=requested)
        except ValueError:
            continue
        for operation, sizes in requested:
            shapes.setdefault((getattr(spec, "ranks", 1), operation), set()).add(sizes)
    return shapes


def traced_on(spec: TracedSpec, hardware: HardwareFile) -> list[TracedNetwork]:
    """Traces the operators of each stage of a step, as on the hardware file's device. Imports torch.

    Raises ValueError for a step that cannot be traced, and without torch.
    """
    return list(_operators().traced_isolated(spec, _architecture(hardware, spec.device)))


def uncut_on(model: UserModel, hardware: HardwareFile, device: str) -> dict[str, str]:
    """Returns, by axis, why a user's network cannot be cut along it. Imports torch.

    Raises ValueError without torch.
    """
    return dict(_operators().uncut_isolated(model, _architecture(hardware, device)))


def _operators() -> Any:
    """Returns the module that traces steps. Raises ValueError without torch."""
    try:
        from stepgauge.bench import operators
    except ModuleNotFoundError as error:
        raise ValueError(f"steps of {TRACED} are traced, which needs torch: {error}") from None
    return operators


def _architecture(hardware: HardwareFile, device: str) -> str:
    """Returns the architecture for which steps are traced."""
    if device.startswith("cpu"):
        return "cpu"
    return (hardware.peaks and hardware.peaks.architecture) or "sm90"
