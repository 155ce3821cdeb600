"""Experiment: steps are predicted from a calibration of this machine, then measured."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.terms import TRAFFIC
from stepgauge.cost.rank import operations_of, phases_of
from stepgauge.report import prediction_tables
from stepgauge.report.page import Block, Text
from stepgauge.report.prediction_errors import sentence
from stepgauge.spec.calibration import CalibrationSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.hardware_files import file_of
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.predictions import BEFORE
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore
from stepgauge.study import collectives
from stepgauge.study.experiment import Experiment, StudyMachine
from stepgauge.study.sizes import step_spec
from stepgauge.validate.predicted import predicted

ON_CPU = (
    "On a CPU, calibration takes one second per operation, and the ranks share the cores with each "
    "other and with other programs, so part of the errors comes from disturbances and not from the "
    "model."
)
LINKS = ("all_reduce", "all_gather", "reduce_scatter")
CALIBRATION_S = 1.0  # per operation, over all its shapes
# Used by no other experiment, so that each row is predicted before it is first measured.
BATCH, CONTEXT = 4, 96


def needs(machine: StudyMachine) -> str | None:
    if machine.is_gpu and file_of(machine.name, 0) is None:
        return (
            "there is no hardware file of this device; stepgauge calibrate makes one in 9 minutes"
        )
    return None


def specs(machine: StudyMachine, folder: Path) -> Sequence[Any]:
    """Returns a calibration of the operations that the steps need, the predictions, and the steps."""
    from stepgauge.bench.sweep import Job

    rows = _specs(machine)
    predict = functools.partial(predict_row, folder=folder)
    return [
        *([] if machine.is_gpu else _calibration(machine, rows)),
        *(Job(predict, spec, process="prediction", provenance="modelled") for spec in rows),
        *rows,
    ]


def _specs(machine: StudyMachine) -> list[Any]:
    if machine.is_gpu:
        return [
            step_spec(machine, size, load=(4, 384), precision=precision, compile=compile)
            for size in ("small", "medium")
            for precision, compile in (("fp32", "off"), ("bf16", "off"), ("bf16", "on"))
        ]
    model = ModelSpec.preset("tiny", context_length=CONTEXT)
    ranks = [
        DataParallelSpec(model=model, size="tiny", wrapper=wrapper, batch=BATCH // 2, warmup=2,
                         steps=5)
        for wrapper in ("naive", "bucketed", "zero1")
    ]  # fmt: skip
    single_rank = [step_spec(machine, size, load=(BATCH, CONTEXT)) for size in ("nano", "tiny")]
    return [*single_rank, *(spec.canonical() for spec in ranks)]


def _calibration(machine: StudyMachine, specs: Sequence[Any]) -> list[Any]:
    """Returns specs of the steps' operations, on one rank and on two at once, and of collectives, which
    are the same as in the collectives experiment.
    """
    import torch

    from stepgauge.calibrate import run as calibration

    whole = operations_of(specs[0], NetworkPart(batch=specs[0].batch))
    phases = phases_of(whole, specs[0].phases).values()
    # An operation that is not calibrated on this kind of device is predicted from its bytes.
    timed = set(calibration.names(torch.device(machine.device)))
    used = dict.fromkeys([TRAFFIC, *(term.operation for terms in phases for term in terms)])
    names = [name for name in used if name in timed]
    operations = [
        CalibrationSpec(operation=name, ranks=ranks, seconds=CALIBRATION_S, device=machine.device)
        for ranks in (1, 2)
        for name in names
    ]
    every_collective = collectives.specs(machine, Path())
    links = [spec for spec in every_collective if spec.op in LINKS and spec.algorithm == "library"]
    return [*map(calibration.job, operations), *links]


def predict_row(spec: Any, folder: Path) -> Record:
    """Predicts a row from the calibration in the run's folder, on a GPU from the device's hardware file.
    Raises ValueError for a spec that has no model.
    """
    import torch

    from stepgauge.calibrate.machine import hardware_file
    from stepgauge.measure.environment import environment

    where = environment(torch.device(spec.device))
    known = file_of(where["device"], where["threads"])
    hardware = HardwareFile.read(known) if known else HardwareFile(name="study")
    if spec.device == "cpu":
        hardware = hardware_file(RunStore(folder).read().latest(), HardwareFile(name="study"))
    prediction = predicted(spec, hardware)
    note = "; ".join(filter(None, (BEFORE, prediction.note)))
    return dataclasses.replace(prediction, environment=where, note=note)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    return prediction_tables.blocks(records) or [Text("No step was both predicted and measured.")]


EXPERIMENT = Experiment(
    name="validation",
    title="Predicted and measured",
    question=prediction_tables.QUESTION,
    method=f"{prediction_tables.METHOD} {ON_CPU}",
    specs=specs,
    blocks=blocks,
    answer=sentence,
    needs=needs,
)
