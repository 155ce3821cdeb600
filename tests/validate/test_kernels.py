"""Compares the terms of a predicted step with the kernels of a trace."""

import dataclasses
from pathlib import Path

import pytest

from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.step import predict
from stepgauge.spec.analysis import Analysis, Cell, Idle
from stepgauge.spec.calibration import LAUNCH_GAP, OperationTable
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.validate.kernels import compare_parts, comparison_table

H100 = HardwareFile.read(Path(__file__).parents[2] / "hardware" / "h100-sxm.json")
STEP = StepSpec(model=ModelSpec.preset("medium"), size="medium", precision="bf16", device="cuda")


def cell(phase, place, kind, us, name="kernel", calls=2):
    return Cell(name=name, kind=kind, rule="", phase=phase, range=place, calls=calls, us=us,
                busy_us=us, idle_us=0, flops=0, bytes=0)  # fmt: skip


def trace(*cells):
    return Analysis(source="", on_device=True, steps=2, cells=list(cells),
                    idle=[Idle(reason="", phase="forward", gaps=1, us=500.0)])  # fmt: skip


def test_each_part_has_its_terms_and_kernels_and_all_parts_add_up_to_the_step():
    found = trace(
        cell("forward", "blocks.*.feed_forward.gate_up", "matmul", 8000.0, "nvjet"),
        cell("forward", "blocks.*.feed_forward.gate_up", "copy", 1000.0),
        cell("forward", "blocks.*.attention.rotation", "elementwise", 600.0),
        cell("backward", "blocks.*.attention", "attention", 4000.0),
        cell("optimizer", "", "optimizer", 3000.0),
        cell("", "", "host", 9e9),  # no kernel of a step
    )
    prediction = predict(STEP, CalibratedMachine(H100))
    parts = {(p.phase, p.part, p.kind): p for p in compare_parts(prediction, found)}
    product = parts["forward", "feed_forward.gate_up", "matmul"]
    assert product.measured_ms == 4.0 and product.launches == 1 and product.longest == "nvjet"
    terms = {(row[0], row[1]): row[5] / 1e3 for row in prediction.tables["terms"][1:]}
    assert product.predicted_ms == pytest.approx(terms["forward", "feed_forward.up"])
    assert parts["forward", "attention", "traffic"].measured_ms == 0.3
    assert parts["forward", "attention", "traffic"].predicted_ms > 0
    assert parts["backward", "attention", "attention"].predicted_ms > 0
    assert parts["forward", "", "waits"].measured_ms == 0.25
    update = parts["optimizer", "", "update"]  # one row, not two of different kinds
    assert update.measured_ms == 1.5 and update.predicted_ms > 0
    predicted, measured = (sum(getattr(p, name) for p in parts.values())
                           for name in ("predicted_ms", "measured_ms"))  # fmt: skip
    assert predicted == pytest.approx(prediction.median("step_ms"))
    assert measured == pytest.approx((8000 + 1000 + 600 + 4000 + 3000 + 500) / 2e3)
    table = comparison_table(prediction, found)
    differences = [abs(row[5]) for row in table.rows]
    assert (
        differences == sorted(differences, reverse=True)
        and "compared with the kernels" in table.caption
    )
    waits = [p for p in parts.values() if p.kind == "waits"]
    kernels = predicted - sum(p.predicted_ms for p in waits)
    assert (
        f"Without waits, which the profiler lengthens: {kernels:.1f} and 8.3 ms, " in table.caption
    )
    without_waits = comparison_table(prediction, dataclasses.replace(found, idle=[]))
    assert "waits" not in without_waits.caption  # as on a CPU


def test_gaps_between_kernels_are_compared_with_waits():
    """Kernels in a trace have no gaps. In this step the GPU never waits for the host."""
    large = dataclasses.replace(STEP, batch=64)
    gap = OperationTable(("kernels",), ((1, 2.0),))
    later = dataclasses.replace(H100, operations={**H100.operations, LAUNCH_GAP: gap})
    found = trace(cell("forward", "blocks.*.attention", "attention", 4000.0))
    with_gaps, without = (
        {(p.phase, p.part, p.kind): p.predicted_ms for p in compare_parts(prediction, found)}
        for prediction in (predict(large, CalibratedMachine(file)) for file in (later, H100))
    )
    longer = {key for key, ms in with_gaps.items() if ms > without.get(key, 0.0) + 0.1}
    assert longer == {("forward", "", "waits"), ("backward", "", "waits")}


def test_a_compiled_step_is_compared_by_phase_and_class_because_it_has_no_ranges():
    found = trace(cell("forward", "", "matmul", 8000.0), cell("forward", "", "elementwise", 2000.0))
    parts = compare_parts(predict(STEP, CalibratedMachine(H100)), found)
    forward = {p.kind: p for p in parts if p.phase == "forward"}
    assert {p.part for p in parts} == {""} and len(forward) >= 3
    assert forward["matmul"].measured_ms == 4.0 and forward["traffic"].measured_ms == 1.0


def test_predicted_operators_are_compared_with_ranges_by_class():
    """Terms of a network without formulas name operators, but its trace names modules."""
    found = trace(cell("forward", "blocks.*.feed_forward", "matmul", 8000.0))
    terms = [["phase", "term", "operation", "sizes", "count", "us", "source"],
             ["forward", "_grouped_mm", "matmul grouped nt bf16", "", 24, 3000.0, "calibrated"]]  # fmt: skip
    prediction = predict(STEP, CalibratedMachine(H100))
    traced = dataclasses.replace(prediction, tables={"terms": terms})
    product = next(p for p in compare_parts(traced, found) if p.kind == "matmul")
    assert (product.part, product.predicted_ms, product.measured_ms) == ("", 3.0, 4.0)


def test_a_trace_without_kernels_is_refused():
    empty = Analysis(source="", on_device=True, steps=2, cells=[], idle=[])
    with pytest.raises(ValueError, match="the trace has no kernels"):
        comparison_table(predict(STEP, CalibratedMachine(H100)), empty)
