"""E14: steps predicted from a calibration of this machine, then run."""

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
    "On a CPU the calibration takes a second an operation, and ranks share the cores with each "
    "other and with whatever else runs: errors say as much of the machine's quiet as of the model."
)
LINKS = ("all_reduce", "all_gather", "reduce_scatter")
CALIBRATION_S = 1.0  # an operation, over all its shapes: those of small steps
BATCH, CONTEXT = 4, 96  # of no other experiment: each row is predicted before it is run


def needs(machine: StudyMachine) -> str | None:
    if machine.is_gpu and file_of(machine.name, 0) is None:
        return "no hardware file of this device: stepgauge calibrate makes one in 3 minutes"
    return None


def specs(machine: StudyMachine, folder: Path) -> Sequence[Any]:
    """A calibration of what the steps need, predictions, and the steps."""
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
    alone = [step_spec(machine, size, load=(BATCH, CONTEXT)) for size in ("nano", "tiny")]
    return [*alone, *(spec.canonical() for spec in ranks)]


def _calibration(machine: StudyMachine, specs: Sequence[Any]) -> list[Any]:
    """The operations of the steps, alone and on two ranks side by side, and collectives, which are
    those of the experiment of that name.
    """
    import torch

    from stepgauge.calibrate import run as calibration

    whole = operations_of(specs[0], NetworkPart(batch=specs[0].batch))
    phases = phases_of(whole, specs[0].phases).values()
    # what is not timed on this kind of device is predicted by its bytes
    timed = set(calibration.names(torch.device(machine.device)))
    used = dict.fromkeys([TRAFFIC, *(term.operation for terms in phases for term in terms)])
    names = [name for name in used if name in timed]
    operations = [
        CalibrationSpec(operation=name, ranks=ranks, seconds=CALIBRATION_S, device=machine.device)
        for ranks in (1, 2)
        for name in names
    ]
    asked = collectives.specs(machine, Path())
    links = [spec for spec in asked if spec.op in LINKS and spec.algorithm == "library"]
    return [*map(calibration.job, operations), *links]


def predict_row(spec: Any, folder: Path) -> Record:
    """The prediction of a row, from the calibration in the run's folder, else from this device's
    hardware file. Raises ValueError for what is not modelled.
    """
    import torch

    from stepgauge.calibrate.machine import hardware_file
    from stepgauge.measure.environment import environment

    where = environment(torch.device(spec.device))
    known = file_of(where["device"], where["threads"])
    hardware = HardwareFile.read(known) if known else HardwareFile(name="study")
    if spec.device == "cpu":
        hardware = hardware_file(RunStore(folder).read().latest(), HardwareFile(name="study"))
    return dataclasses.replace(predicted(spec, hardware), environment=where, note=BEFORE)


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
