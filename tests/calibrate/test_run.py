"""A calibration's rows, and the hardware file that they become."""

import dataclasses

import pytest
import torch

from stepgauge.calibrate.operations import operations
from stepgauge.calibrate.run import hardware_file, names, run
from stepgauge.cost.machine import Machine
from stepgauge.spec.calibration import CalibrationSpec
from stepgauge.spec.hardware import HardwareFile

CPU = torch.device("cpu")


def spec(operation):
    return CalibrationSpec(operation=operation, milliseconds=0.0)


def test_every_shape_has_a_time_and_the_file_gives_it_back(tmp_path):
    asked = ["traffic", "layernorm backward fp32", "optimizer adamw fp32"]
    records = [run(spec(name)) for name in asked]
    for name, record in zip(asked, records, strict=True):
        grid = list(operations(small=True)[name].grid)
        _, *rows = record.tables["times"]
        assert [tuple(row[:-1]) for row in rows] == grid
        assert all(row[-1] > 0 for row in rows)
        assert record.median("shapes") == len(grid)
    before = HardwareFile(name="box", other={"later": 1})
    path = tmp_path / "box.json"
    hardware_file("box", records, before).write(path)
    read = HardwareFile.read(path)
    assert read.other == {"later": 1} and read.device == records[0].environment["device"]
    (*sizes, us) = records[1].tables["times"][1]
    assert Machine(read).time("layernorm backward fp32", *sizes).us == us


def test_a_row_of_today_takes_the_place_of_an_older_one():
    (record,) = [run(spec("traffic"))]
    slower = [[*row[:-1], 2 * row[-1]] for row in record.tables["times"][1:]]
    later = dataclasses.replace(record, tables={"times": [record.tables["times"][0], *slower]})
    once = hardware_file("box", [record], HardwareFile(name="box"))
    twice = hardware_file("box", [later], once)
    assert twice.operations["traffic"].rows[0][-1] == 2 * once.operations["traffic"].rows[0][-1]


def test_an_unknown_operation_is_told():
    with pytest.raises(ValueError, match="operation is 'walk'; choose one of"):
        run(spec("walk"))
    assert "matmul tn bf16" in names(CPU) and "host eager bf16" not in names(CPU)
