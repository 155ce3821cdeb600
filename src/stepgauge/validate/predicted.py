"""The modelled record of a spec: which part of cost/ predicts which kind of row."""

from stepgauge.cost.data_parallel import predict_data_parallel
from stepgauge.cost.machine import Machine
from stepgauge.cost.step import predict
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec


def predicted(spec: object, hardware: HardwareFile) -> Record:
    """What the row of the spec is predicted to be on that machine. Raises ValueError for what is not
    modelled, or not calibrated.
    """
    match spec:
        case StepSpec():
            return predict(spec, Machine(hardware))
        case DataParallelSpec():
            return predict_data_parallel(spec, Machine(hardware.on_ranks(spec.ranks)))
    raise ValueError(f"{type(spec).__name__} has no cost model yet")
