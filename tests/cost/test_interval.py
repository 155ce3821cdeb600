"""How far a predicted step may be off, and the notes that say why."""

import dataclasses

import pytest
from tests.cpu_machine import made_up

from stepgauge.cost.rates.estimate import (
    CALIBRATED,
    DISTURBED,
    EXTRAPOLATED,
    LARGER_PER_DOUBLING,
    NEAR,
    SPREAD,
    Estimate,
    spread,
)
from stepgauge.cost.rates.grid import WORK, Grid
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.step import predict
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import SHIPPED, HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec

NANO = StepSpec(model=ModelSpec.preset("nano"), size="nano", device="cpu", batch=1)
NT = "matmul nt fp32"


def predicted(file, spec=NANO, **changed):
    """Predicts the step from a file of which the table of products is changed."""
    table = dataclasses.replace(file.operations[NT], **changed)
    operations = {**file.operations, NT: table}
    return predict(spec, CalibratedMachine(dataclasses.replace(file, operations=operations)))


def test_a_time_is_less_certain_the_farther_it_is_extrapolated():
    table = OperationTable(("m", "n", "k"), ((64, 64, 64, 10.0), (128, 64, 64, 18.0)))
    grid = Grid(table, WORK["matmul"], may_be_launches=False)
    assert grid.time((128, 64, 64)).spread == SPREAD[CALIBRATED]
    near, larger, smaller = (grid.time((m, 64, k)) for m, k in ((2048, 64), (2**16, 64), (1, 1)))
    assert near.times_away == 16 and near.spread == SPREAD[EXTRAPOLATED]
    assert (larger.times_away, smaller.times_away) == (2**9, 2**12)
    assert (larger.smaller, smaller.smaller) == (False, True)
    assert larger.spread == pytest.approx(SPREAD[EXTRAPOLATED] + 4 * LARGER_PER_DOUBLING)
    assert smaller.spread == pytest.approx(SPREAD[EXTRAPOLATED] + 2**7 - 1)
    assert Estimate(1.0, EXTRAPOLATED, NEAR).spread == SPREAD[EXTRAPOLATED]


def test_a_step_far_from_the_timed_sizes_says_so_and_has_a_wider_interval():
    near = predicted(made_up())
    large = ModelSpec.preset("large")
    far = predicted(made_up(), dataclasses.replace(NANO, model=large, size="large"))
    assert spread(far) > 1.0 and spread(far) > 1.5 * spread(near)
    assert "far from what was timed: " in far.note and "feed_forward" in far.note


def test_times_beside_other_work_may_be_due_to_it_and_no_time_changes():
    quiet, beside = predicted(made_up()), predicted(made_up(), disturbed=True)
    assert beside.metrics == quiet.metrics
    assert spread(beside) > spread(quiet)
    head, *rows = beside.tables["terms"]
    terms = [dict(zip(head, row, strict=True)) for row in rows]
    assert {term["spread"] >= DISTURBED for term in terms if term["operation"] == NT} == {True}


def test_an_operation_of_which_few_shapes_were_timed_is_named():
    assert "few shapes" not in predicted(made_up(), left_out=1).note
    note = predicted(made_up(), left_out=57).note
    assert f"few shapes were timed of {NT} (1 of 58): calibrate" in note


def test_attention_of_long_sequences_that_another_package_ran_is_named():
    file = HardwareFile.read(SHIPPED / "h200-sxm.json")

    def note(length):
        model = ModelSpec.preset("large", context_length=length, attention="triton")
        return predict(
            StepSpec(model=model, batch=1, precision="bf16", device="cuda"), CalibratedMachine(file)
        ).note

    assert "long shapes of attention triton backward bf16 were timed in cuDNN and Flash" in note(
        4096
    )
    assert "FlashAttention" not in note(2048)


def test_older_records_have_the_interval_of_their_sources():
    record = predicted(made_up())
    head, *rows = record.tables["terms"]
    older = [row[: head.index("source") + 1] for row in (head, *rows)]
    sources = {row[-1] for row in older[1:]}
    found = spread(dataclasses.replace(record, tables={"terms": older}))
    assert min(SPREAD[s] for s in sources) < found <= max(SPREAD[s] for s in sources)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_scaled_time_keeps_its_doubts(factor):
    known = Estimate(10.0, EXTRAPOLATED, 100.0, disturbed=True)
    assert known.scaled(factor) == dataclasses.replace(known, us=10.0 * factor)
